"""Test files of other projects: fetched, and run each where it disturbs nobody and nobody disturbs it."""
import ctypes, os, signal, subprocess

FETCH_COMMIT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../scripts/fetch-commit")
CLONE_NEWNET = 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)
FIRST_NETWORK = os.open("/proc/self/ns/net", os.O_RDONLY)


class Missing(Exception):
    """Something that it takes is not there: a sentence that says what to do."""


def fetch(copy, repository, commit):
    """One commit of a repository on GitHub into a directory, unless it is there."""
    done = subprocess.run([FETCH_COMMIT, copy, repository, commit], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise Missing((done.stderr.strip() or "git failed").splitlines()[-1])


def own_network():
    """A loopback of our own, as root: nothing else listens on a suite's ports, and nothing leaves."""
    if os.geteuid() != 0:
        return
    if LIBC.unshare(CLONE_NEWNET) != 0 or subprocess.run(["ip", "link", "set", "lo", "up"]).returncode:
        raise Missing("no network namespace can be made (unshare: " + os.strerror(ctypes.get_errno()) + ")")


def to_first_network():
    """In a child: back where this process began. Some of the machine's settings can be changed there alone."""
    if LIBC.setns(FIRST_NETWORK, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def started(command, directory, environment):
    """A test file, with its output in one pipe, and in a session of its own."""
    return subprocess.Popen(command, cwd=directory, env=environment, start_new_session=True, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")


def finished(process, timeout, when_it_hangs=lambda: ""):
    """Its output and its exit status; one that hangs is ended with its servers, `when_it_hangs` asked for more output."""
    found = ""
    for seconds, end in (timeout, signal.SIGTERM), (10, signal.SIGKILL):
        try:
            return process.communicate(timeout=seconds)[0] + found, process.returncode
        except subprocess.TimeoutExpired:
            found = found or when_it_hangs()
            os.killpg(process.pid, end)
    return process.communicate()[0] + found, "none, it hung"
