"""HAProxy's regression tests: those that its own script picks for the installed HAProxy. Only HAProxy runs under
`shunt run` (variant `server`), or vtest, too (variant `all`). vtest has the tests' clients and servers."""
import fnmatch, os, re, shutil, subprocess, tempfile

from confined import Missing, fetch, finished, started
from machine import ROOT
from tap import Result

NAME = "haproxy"
TIMEOUT = 60  # seconds for one file
EXPECTED = {}  # (file, assertion): reason why a difference is meant
FILES = ["*"]
QUICK = ["*/cookie_insert_indirect.vtc", "*/unique-id-from-proxy.vtc", "*/basic.vtc", "*/http_reuse_always.vtc"]
HAPROXY = "/usr/sbin/haproxy"
SUITE = f"{ROOT}/target/haproxy-suite/haproxy"
VTEST = f"{ROOT}/target/haproxy-suite/vtest"
COPIES = [SUITE, VTEST]


def prepare():
    fetch(SUITE, "haproxy/haproxy", "a0abec8bc0f5ac547cd2ee2c7af9f7d911549c78")  # v2.7-dev9
    fetch(VTEST, "vtest/VTest2", "11ee91098c7a1f0a1f8afab9a7356609bfd3cb2d")  # 2025-07-14
    built = subprocess.run(["make", "-C", VTEST, "vtest"], capture_output=True, text=True)
    if built.returncode:
        raise Missing(f"vtest cannot be built: {built.stderr.strip().splitlines()[-1]}")
    return picked()


def picked():
    """Returns the tests whose conditions the installed HAProxy meets. The suite's script lists them. It runs none,
    because /bin/true stands in for vtest."""
    environment = dict(os.environ, HAPROXY_PROGRAM=HAPROXY, VTEST_PROGRAM="/bin/true")
    done = subprocess.run(["scripts/run-regtests.sh"], cwd=SUITE, env=environment, capture_output=True, text=True)
    return re.findall(r"^  Add test: (\S+)$", done.stdout, re.M)


def sessions(names, patterns):
    return [[name] for name in sorted(names) if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def run(machine, variant, names, _):
    directory = tempfile.mkdtemp(prefix="shunt-haproxy-")
    program = f"{directory}/haproxy"
    before = " ".join(machine.under_shunt([])) if variant == "server" else ""
    with open(program, "w") as file:
        file.write(f"#!/bin/sh\nexec {before} {HAPROXY} \"$@\"\n")
    os.chmod(program, 0o755)
    environment = dict(os.environ, HAPROXY_PROGRAM=program, HAPROXY_ARGS="-dM", TMPDIR=directory)
    results = {name: run_file(machine, variant, name, environment) for name in names}
    shutil.rmtree(directory, ignore_errors=True)
    return results


def run_file(machine, variant, name, environment):
    vtest = [f"{VTEST}/vtest", "-b", str(2 << 20), "-k", "-t", "30", "-v", name]
    command = machine.under_shunt(vtest) if variant == "all" else vtest
    output, status = finished(started(command, SUITE, environment), TIMEOUT, machine.hanging)
    # The exit status of vtest says how the file ended. A whole file counts as one assertion.
    line = {0: f"ok 1 - {name}", 1: f"not ok 1 - {name}", 2: f"not ok 1 - {name}", 77: "1..0 # skip by vtest"}
    return Result(f"{output}\n{line.get(status, '')}\n", 0 if status in line else status)
