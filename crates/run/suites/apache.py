"""Apache's test framework: only httpd runs under `shunt run` (variant `server`), or the Perl clients, too (variant
`all`). One httpd serves all test files.

The framework runs as the user nobody, in its own copy of the suite, because Apache::Test refuses to run as root."""
import fnmatch, glob, os, re, shutil, subprocess, tempfile

from confined import Missing, fetch, finished, started
from machine import ROOT
from tap import Result

NAME = "apache"
TIMEOUT = 1800  # seconds for all files
FILES = ["t/apache/*", "t/filter/*", "t/http11/*", "t/modules/*", "t/protocol/*", "t/ssl/*"]
QUICK = ["t/http11/*", "t/filter/*", "t/modules/include.t"]
# Left out: tests that only check whether the other tests of their directory can run, and one that takes minutes and is
# not about proxying or bodies.
LEFT_OUT = ["t/*/all.t", "t/apache/leaks.t"]
EXPECTED = {}  # (file, assertion): reason why a difference is meant

SUITE = f"{ROOT}/target/apache-suite/httpd-tests"
COPIES = [SUITE]
COMMIT = "c80f65f35d181cde20df4bf51e07d2dbd928807a"  # 2024-02-07
MODULES = "/usr/lib/apache2/modules"
# Modules that are not loaded: all MPMs except one, those that need a database or another server, and some others.
NOT_LOADED = """mpm_prefork mpm_worker perl cgi authnz_ldap ldap suexec md log_forensic dialup cern_meta heartmonitor
lbmethod_heartbeat authn_dbd authz_dbd session_dbd dbd ident imagemap userdir socache_redis file_cache""".split()
AS_NOBODY = ["setpriv", "--reuid", "nobody", "--regid", "nogroup", "--clear-groups"]


def prepare():
    for program, package in ("apxs", "apache2-dev"), ("apache2", "apache2-bin"):
        if not shutil.which(program):
            raise Missing(f"{program} is not installed; make packages installs it ({package})")
    fetch(SUITE, "apache/httpd-tests", COMMIT)
    modules = [os.path.basename(path)[len("mod_"):-len(".so")] for path in sorted(glob.glob(f"{MODULES}/mod_*.so"))]
    loaded = [name for name in modules if name not in NOT_LOADED]
    with open(f"{SUITE}/modules.conf", "w") as file:
        file.writelines(f"LoadModule {name}_module {MODULES}/mod_{name}.so\n" for name in loaded)
    # The framework compiles its own modules, and then says that it must not run as root. Only the modules are needed.
    log = configured(SUITE) + subprocess.run(framework("-configure"), cwd=SUITE, capture_output=True, text=True).stdout
    if not glob.glob(f"{SUITE}/c-modules/*/.libs/*.so"):
        raise Missing(f"the modules of Apache's suite cannot be compiled: {log.strip().splitlines()[-1]}")


def configured(directory):
    command = ["perl", "Makefile.PL", "-apxs", shutil.which("apxs"), "-httpd_conf", f"{directory}/modules.conf"]
    return subprocess.run(command, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout


def framework(*arguments):
    return ["perl", "t/TEST", "-httpd_conf", "modules.conf", "-apxs", shutil.which("apxs"), *arguments]


def sessions(_, patterns):
    names = sorted(os.path.relpath(path, SUITE) for path in glob.glob(f"{SUITE}/t/*/*.t"))
    return [[name for name in names if like(name, patterns) and not like(name, LEFT_OUT)]]


def like(name, patterns):
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def run(machine, variant, names, _):
    directory = tempfile.mkdtemp(prefix="shunt-apache-")
    copy = f"{directory}/suite"
    subprocess.run(["cp", "-a", SUITE, copy], check=True)
    configured(copy)
    subprocess.run(["chown", "-R", "nobody:nogroup", directory], check=True)
    environment = dict(os.environ, HOME=directory, LC_ALL="C")

    def step(under_shunt, *arguments):
        command = AS_NOBODY + framework(*arguments)
        process = started(machine.under_shunt(command) if under_shunt else command, copy, environment)
        return finished(process, TIMEOUT, machine.hanging)

    log, status = step(variant != "plain", "-start-httpd")
    if status == 0:
        log, status = step(variant == "all", "-run-tests", "-verbose", *names)
        step(False, "-stop-httpd")
    results = split(log, names, status)
    shutil.rmtree(directory, ignore_errors=True)
    return results


def split(log, names, status):
    """Returns the result of each file. The harness prints a file's name and dots, and then its TAP."""
    parts = re.split(r"^(t/\S+) \.+ ?", log, flags=re.M)
    outputs = dict(zip(parts[1::2], parts[2::2]))
    return {name: result(outputs.get(name), status) for name in names}


def result(output, status):
    if output is None:
        return Result("", f"{status}: it was not run")
    # If a file skips all of its tests, the harness prints only this line about it.
    if m := re.match(r"skipped(?:: (.*))?$", output, re.M):
        return Result(f"1..0 # skip {m.group(1)}", 0)
    ended = re.search(r"^Dubious, test returned (\d+)", output, re.M)
    return Result(output, "none, it hung" if "==== hangs ====" in output else int(ended.group(1)) if ended else 0)
