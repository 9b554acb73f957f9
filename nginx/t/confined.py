"""Runs test files of other projects isolated from everything else on this machine, and fetches these files."""
import ctypes, os, signal, subprocess

FETCH_COMMIT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../scripts/fetch-commit")
CLONE_NEWNET = 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)
FIRST_NETWORK = os.open("/proc/self/ns/net", os.O_RDONLY)


class Missing(Exception):
    """Something that is needed is missing. The message says what to do."""


def fetch(copy, repository, commit):
    """Fetches one commit of a repository on GitHub into a directory, unless the commit is there already."""
    done = subprocess.run([FETCH_COMMIT, copy, repository, commit], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise Missing((done.stderr.strip() or "git failed").splitlines()[-1])


def own_network():
    """Moves this process into a new network namespace. Does nothing if the process is not root's. In the new namespace
    nothing else listens on a suite's ports, and no packet leaves."""
    if os.geteuid() != 0:
        return
    if LIBC.unshare(CLONE_NEWNET) != 0 or subprocess.run(["ip", "link", "set", "lo", "up"]).returncode:
        raise Missing("no network namespace can be made (unshare: " + os.strerror(ctypes.get_errno()) + ")")


def to_first_network():
    """Returns to the network namespace in which this program began. To be called in a child process that changes
    settings which can be changed only there."""
    if LIBC.setns(FIRST_NETWORK, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def started(command, directory, environment):
    """Starts a test file in a new session, with its output in one pipe."""
    return subprocess.Popen(command, cwd=directory, env=environment, start_new_session=True, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")


def finished(process, timeout, when_it_hangs=lambda: ""):
    """Waits for a test file's process. Returns its output and exit status. If the process has not ended after `timeout`
    seconds, calls `when_it_hangs` for more output, and then ends the process and its servers."""
    found = ""
    for seconds, end in (timeout, signal.SIGTERM), (10, signal.SIGKILL):
        try:
            return process.communicate(timeout=seconds)[0] + found, process.returncode
        except subprocess.TimeoutExpired:
            found = found or when_it_hangs()
            os.killpg(process.pid, end)
    return process.communicate()[0] + found, "none, it hung"
