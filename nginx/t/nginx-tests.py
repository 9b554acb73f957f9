#!/usr/bin/env python3
"""Runs nginx's own test suite with Shunt's module, and says what the module changes.

The suite (https://github.com/nginx/nginx-tests, one pinned commit) runs five times against the installed nginx:

  plain       without the module: what the others are compared with
  loaded      with load_module alone
  relaying    with every directive on for every server, and no agent: everything has to be relayed
  shortcuts   the same, with the stand-in agent (agent.py): proxied files really take the shortcut (needs root)
  fetching    the same, and the kernel refuses every handoff: bodies come by way of the agent (needs root)

Compared is every single assertion of every test file, not only whether the file passes. A test that fails without
the module too fails for reasons of its own, and is no difference. One that differs is run again, alone, with and
without; only a difference that stays is one. The differences that are meant are in EXPECTED, each with its reason.

The suite needs perl; what it finds missing (perl modules, dynamic modules of nginx) it skips. As root everything
runs in a network namespace of its own.
"""
import argparse, ctypes, fnmatch, glob, multiprocessing, os, re, shutil, signal, subprocess, sys, tempfile, time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import agent as agents

REPOSITORY = "https://github.com/nginx/nginx-tests"
COMMIT = "7ecb7ae5b6949d4f8687d72a41a7398cce5778c3"  # 2022-10-26, a week after nginx 1.22.1
CHECKOUT = os.path.join(HERE, "../../target/nginx-tests", COMMIT)
MODULE = os.path.abspath(os.path.join(HERE, "../build/ngx_http_shunt_module.so"))
SHIM = os.path.join(HERE, "build/kernel_shim.so")
CLONE_NEWNET = 0x40000000
TIMEOUT = 180  # seconds for one test file
VARIANTS = "plain loaded relaying shortcuts fetching".split()
WITH_AGENT = {"shortcuts", "fetching"}

# What --quick leaves: the parts of nginx that the module has to do with, or stands next to.
QUICK = """proxy*.t upstream*.t http_*.t fastcgi*.t uwsgi*.t scgi*.t ssi*.t gzip*.t gunzip*.t sub_filter*.t range*.t
slice.t not_modified*.t limit_rate*.t image_filter*.t access_log*.t headers.t addition*.t charset*.t mirror*.t
post_action*.t auth_request*.t realip*.t trailers.t binary_upgrade.t worker_shutdown*.t""".split()

# (file, assertion): reason. Every entry is a difference that is meant, in the variants with an agent.
LONGER_REQUEST = "the request has Shunt-Consent in it, and its length a digit more"
NOTHING_CAME = "what came from the upstream is a header without a body"
EXPECTED = {
    ("proxy_variables.t", 3): LONGER_REQUEST,
    ("proxy_variables.t", 4): LONGER_REQUEST,
    ("trailers.t", 16): NOTHING_CAME,
}

DIRECTIVES = """
shunt_agent {dir}/shuntd.sock;
shunt on; shunt_trust all; shunt_offer on; shunt_offer_min_length 1;
"""


# ---- one test file ----

def tap(output):
    """TAP, as {number: (state, description)}, and the reason why the file as a whole was skipped, or None."""
    results, skipped = {}, None
    for line in output.splitlines():
        if m := re.match(r"1\.\.0\s*#\s*skip\S*\s*(.*)", line, re.I):
            skipped = m.group(1)
        if m := re.match(r"(not )?ok (\d+)(?: - )?(.*)$", line):
            mark = re.search(r"#\s*(todo|skip)\b", m.group(3), re.I)
            state = "not ok" if m.group(1) else "ok"
            if mark:
                state = "skip" if mark.group(1).lower() == "skip" else f"todo {state}"
            results[int(m.group(2))] = state, re.sub(r"\s*#.*", "", m.group(3))
    return results, skipped


class Result:
    def __init__(self, output, status):
        self.assertions, self.skipped = tap(output)
        self.output = output
        self.ended = "" if status == 0 or self.failed() else f"exit status {status}"
        self.counters = {}

    def failed(self):
        return [n for n, (state, _) in self.assertions.items() if state == "not ok"]

    def text(self):
        if self.skipped is not None:
            return "skipped"
        if self.ended:
            return self.ended
        return f"{len(self.failed())} failed" if self.failed() else "ok"


def wrapper(path, environment, version_text):
    """What the suite takes for nginx: the real one, that does not claim dynamic modules that are not installed."""
    with open(path + ".version", "w") as f:
        f.write(version_text)
    with open(path, "w") as f:
        f.write(f"#!/bin/sh\n[ \"$1\" = -V ] && exec cat {path}.version >&2\n")
        f.write(f"exec env {environment} {shutil.which('nginx')} \"$@\"\n")
    os.chmod(path, 0o755)


def sendfile(suite, name):
    """Only what nginx would send with sendfile is offered. A file that sets it for itself cannot have it twice."""
    with open(f"{suite}/{name}", errors="replace") as f:
        return "" if "sendfile" in f.read() else "sendfile on;\n"


def finish(perl):
    """Its output and its exit status; a test that hangs is ended with its nginx and its daemons."""
    for seconds, end in (TIMEOUT, signal.SIGTERM), (10, signal.SIGKILL):
        try:
            return perl.communicate(timeout=seconds)[0], perl.returncode
        except subprocess.TimeoutExpired:
            os.killpg(perl.pid, end)
    return perl.communicate()[0], "none, it hung"


def run_file(job):
    variant, name, options = job
    directory = tempfile.mkdtemp(prefix="shunt-nginx-tests-")
    os.chmod(directory, 0o755)
    environment = dict(os.environ, LC_ALL="C", TMPDIR=directory, TEST_NGINX_BINARY=directory + "/nginx",
                       TEST_NGINX_MODULES=options["modules"])
    agent, preload = None, ""
    if variant in WITH_AGENT:
        agent = agents.Agent(directory)
    if variant == "shortcuts":
        preload = f"LD_PRELOAD={SHIM} SHUNT_SHIM={directory}/shim.sock"
    wrapper(directory + "/nginx", preload, options["version"])
    # as root the suite's directories are root's: workers as nobody could not read them
    environment["TEST_NGINX_GLOBALS"] = "user root;\n" if os.geteuid() == 0 else ""
    if variant != "plain":
        environment["TEST_NGINX_GLOBALS"] += f"load_module {MODULE};\n"
    environment["TEST_NGINX_GLOBALS_HTTP"] = sendfile(options["suite"], name)
    if variant not in ("plain", "loaded"):
        environment["TEST_NGINX_GLOBALS_HTTP"] += DIRECTIVES.format(dir=directory)
    perl = subprocess.Popen(["perl", "-I", "lib", name], cwd=options["suite"], env=environment, start_new_session=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    result = Result(*finish(perl))
    if agent:
        result.counters = agent.counters()
        agent.close()
    shutil.rmtree(directory, ignore_errors=True)
    return variant, name, result


def run(jobs, processes, report):
    results = {}
    # a process for each file: the stand-in agent's threads and descriptors end with it
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        for variant, name, result in pool.imap_unordered(run_file, jobs, 1):
            results[variant, name] = result
            report(len(results), len(jobs))
    return results


# ---- the comparison ----

def differences(plain, other):
    """{number: line} of the assertions that are not what they are without the module; 0 is the file as a whole."""
    lines = {}
    for n in sorted(plain.assertions.keys() | other.assertions.keys()):
        a, b = plain.assertions.get(n), other.assertions.get(n)
        if (a and a[0]) != (b and b[0]):
            lines[n] = f"{n} \"{(a or b)[1]}\": {a[0] if a else 'missing'}, now {b[0] if b else 'missing'}"
    if plain.skipped != other.skipped or plain.ended != other.ended:
        lines[0] = f"{plain.text()}, now {other.text()}"
    return lines


def expected(variant, name, lines):
    """The same lines with their reasons, or None: something is not in EXPECTED."""
    reasons = {n: EXPECTED.get((name, n)) for n in lines}
    if variant not in WITH_AGENT or not all(reasons.values()):
        return None
    return {n: f"{line}; {reasons[n]}" for n, line in lines.items()}


class Comparison:
    """The differences by (variant, file): meant, gone when the file ran again alone, and the others."""

    def __init__(self, results, variants, options):
        self.meant, self.unsteady, self.wrong = {}, {}, {}
        for key in sorted(k for k in results if k[0] != "plain" and k[0] in variants):
            lines = differences(results["plain", key[1]], results[key])
            if not lines:
                continue
            if meant := expected(*key, lines):
                self.meant[key] = meant
            elif self.repeated(*key, options):
                self.wrong[key] = lines
            else:
                self.unsteady[key] = lines

    @staticmethod
    def repeated(variant, name, options):
        for _ in range(2):
            again = run([("plain", name, options), (variant, name, options)], 1, lambda *_: None)
            lines = differences(again["plain", name], again[variant, name])
            if not lines or expected(variant, name, lines):
                return False
        return True


# ---- getting ready ----

def fail(sentence):
    print(f"nginx-tests.py: {sentence}", file=sys.stderr)
    sys.exit(2)


def checkout():
    if os.path.exists(CHECKOUT + "/lib/Test/Nginx.pm"):
        return CHECKOUT
    print(f"Fetching {REPOSITORY}, commit {COMMIT[:12]}", flush=True)
    os.makedirs(CHECKOUT, exist_ok=True)
    git = ["git", "-C", CHECKOUT]
    environment = dict(os.environ, GIT_TERMINAL_PROMPT="0")
    for command in "init -q", f"fetch -q --depth 1 {REPOSITORY} {COMMIT}", "checkout -q FETCH_HEAD":
        done = subprocess.run(git + command.split(), stderr=subprocess.PIPE, text=True, env=environment)
        if done.returncode:
            shutil.rmtree(CHECKOUT)
            why = (done.stderr.strip() or "git failed").splitlines()[-1]
            fail(f"the suite cannot be fetched ({why}); with a copy of commit {COMMIT[:12]}, give --suite DIR")
    return CHECKOUT


def version(modules):
    """nginx -V without the dynamic modules that are not installed; and the directory of those that are."""
    text = subprocess.run(["nginx", "-V"], stderr=subprocess.PIPE, text=True).stderr
    modules = modules or (re.search(r"--modules-path=(\S+)", text) or ["", "/usr/lib/nginx/modules"])[1]
    def keep(m):
        name = {"http_xslt_module": "http_xslt_filter_module", "mail": "mail_module", "stream": "stream_module",
                "stream_geoip_module": "stream_geoip_module"}.get(m.group(1), m.group(1))
        return m.group(0) if os.path.exists(f"{modules}/ngx_{name}.so") else ""
    return re.sub(r"--with-([a-z_]+)=dynamic", keep, text), os.path.abspath(modules)


def own_network():
    """A loopback of our own, as root: nothing else listens on the suite's ports, and nothing leaves."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0 or subprocess.run(["ip", "link", "set", "lo", "up"]).returncode:
        fail("no network namespace can be made (unshare: " + os.strerror(ctypes.get_errno()) + ")")


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog="""
examples:
  nginx/t/nginx-tests.py                        everything, ten to twenty minutes on two cores
  nginx/t/nginx-tests.py --quick                proxying, filters, ranges, caches: half of that
  nginx/t/nginx-tests.py 'proxy_cache*' -v      these files, and the output of those that differ
  nginx/t/nginx-tests.py --suite ~/nginx-tests  a copy of the suite, without network

exit status: 0 no difference, 1 a difference that EXPECTED does not have, 2 it could not run.
NO_COLOR in the environment turns colours off.""")
    p.add_argument("files", nargs="*", metavar="PATTERN", help="test files, such as proxy.t or 'ssi*'; default: all")
    p.add_argument("--quick", action="store_true",
                   help="only what the module has to do with, and no variant \"loaded\"")
    p.add_argument("--suite", metavar="DIR", help="a copy of the suite; default: fetched into target/")
    p.add_argument("--modules", metavar="DIR", help="where nginx's dynamic modules are; default: where nginx says")
    p.add_argument("--only", metavar="VARIANT", action="append", choices=VARIANTS[1:],
                   help="of the variants but plain only this one; may be repeated")
    p.add_argument("-j", "--jobs", type=int, default=os.cpu_count(), help="test files at a time; default: one a core")
    p.add_argument("-v", "--verbose", action="store_true", help="the output of files that differ")
    return p.parse_args()


def prepare(a):
    for program in "nginx", "perl":
        if not shutil.which(program):
            fail(f"{program} is not installed")
    for path, target in (MODULE, "make -C nginx"), (SHIM, "make -C nginx/t"):
        if not os.path.exists(path):
            fail(f"{os.path.relpath(path)} is missing; {target} builds it")
    suite = os.path.abspath(a.suite) if a.suite else checkout()
    if not os.path.exists(suite + "/lib/Test/Nginx.pm"):
        fail(f"{suite} is not a copy of nginx-tests: it has no lib/Test/Nginx.pm")
    names = sorted(os.path.basename(f) for f in glob.glob(suite + "/*.t"))
    patterns = a.files or (QUICK if a.quick else ["*"])
    names = [n for n in names if any(fnmatch.fnmatch(n, p) or fnmatch.fnmatch(n, p + ".t") for p in patterns)]
    if not names:
        fail("no test file has such a name")
    variants = VARIANTS[1:] if not a.only else [v for v in VARIANTS if v in a.only]
    if a.quick and not a.only:
        variants.remove("loaded")
    if os.geteuid() != 0 and WITH_AGENT.intersection(variants):
        print("shortcuts and fetching: skipped, the stand-in agent needs root (a BPF ring buffer)")
        variants = [v for v in variants if v not in WITH_AGENT]
    text, modules = version(a.modules)
    return names, ["plain"] + variants, {"suite": suite, "modules": modules, "version": text}


# ---- the report ----

class Paint:
    on = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def __getattr__(self, name):
        code = {"red": 31, "green": 32, "yellow": 33}[name]
        return lambda text: f"\033[{code}m{text}\033[0m" if self.on else text


def progress(done, total):
    if sys.stderr.isatty():
        print(f"\r{done}/{total} ", end="" if done < total else "\r", file=sys.stderr, flush=True)


def summarize(results, names, variants):
    print(f"\n{'':12}{'ok':>6}{'failed':>8}{'skipped':>9}{'assertions':>12}")
    for v in variants:
        rs = [results[v, n] for n in names]
        ok = sum(r.text() == "ok" for r in rs)
        skipped = sum(r.skipped is not None for r in rs)
        print(f"{v:12}{ok:6}{len(rs) - ok - skipped:8}{skipped:9}{sum(len(r.assertions) for r in rs):12}")
    for v in [v for v in variants if v in WITH_AGENT]:
        total = lambda k: sum(results[v, n].counters[k] for n in names)
        shown = "offers shortcuts fetched aborted fetch_failed".split()
        print(f"{v:12}" + ", ".join(f"{total(k)} {k}" for k in shown))


def show(title, found, paint, results, verbose):
    if not found:
        return
    print(f"\n{title}")
    for (variant, name), lines in found.items():
        print(f"  {paint(variant):10} {name}")
        for line in lines.values():
            print(f"             {line}")
        if verbose:
            print(re.sub("^", "             | ", results[variant, name].output, flags=re.M))


def main():
    a = parse_arguments()
    names, variants, options = prepare(a)
    own_network()
    started = time.time()
    print(f"{len(names)} test files, {', '.join(variants)}; {a.jobs} at a time", flush=True)
    results = run([(v, n, options) for v in variants for n in names], a.jobs, progress)
    compared = Comparison(results, variants, options)
    paint = Paint()
    summarize(results, names, variants)
    broken = [n for n in names if results["plain", n].text() not in ("ok", "skipped")]
    if broken:
        print(f"fails without the module too: {' '.join(broken)}")
    show("Differences that are meant:", compared.meant, paint.green, results, False)
    show("Different once, gone when run again alone:", compared.unsteady, paint.yellow, results, a.verbose)
    show("Differences:", compared.wrong, paint.red, results, a.verbose)
    n = len(compared.wrong)
    verdict = paint.red(f"{n} difference{'s' * (n > 1)}") if n else paint.green("no difference that is not meant")
    print(f"\n{verdict}, {time.time() - started:.0f} s")
    return 1 if n else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
