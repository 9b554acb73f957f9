#!/usr/bin/env python3
"""Runs nginx's own test suite with Shunt's module, and says what the module changes.

The suite (https://github.com/nginx/nginx-tests, one pinned commit) runs six times against the installed nginx:

  plain       without the module
  loaded      with load_module alone
  relaying    with every directive on for every server, and no agent: everything has to be relayed
  tiers       without the module, and with two plain proxies in front of every HTTP server
  shortcuts   the same with Shunt: a frontend, an intermediate, the suite's server as backend, two agents
  fetching    the same with clients on the frontend's machine, which get no shortcut: bodies are fetched

The last three need root; each test file has four hosts of the lab (tiers.py). Every single assertion of every test file
is compared: those of loaded, relaying and tiers with plain, those of shortcuts and fetching with tiers. So a test that
fails without Shunt, too, counts for nothing. A file that differs is run up to twice more, alone, with Shunt and
without; only a difference that is there each time counts. The differences that are meant are in EXPECTED, each with its
reason. A run of all files fails if fewer than LEAST_SHORTCUTS shortcuts were taken, or fewer than LEAST_FETCHED bodies
fetched: it would have tested little.

The suite needs perl. It skips tests for which perl modules or dynamic modules of nginx are missing. As root, everything
runs in network namespaces.
"""
import argparse, multiprocessing, os, re, shutil, sys, tempfile, time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import nginx_suite
import tiers
from confined import Missing, finished, own_network, started
from tap import Result, differences

TIMEOUT = 180  # seconds for one test file
# For each variant: the variant that it is compared with.
COMPARED = {"loaded": "plain", "relaying": "plain", "tiers": "plain", "shortcuts": "tiers", "fetching": "tiers"}
VARIANTS = ["plain", *COMPARED]
WITH_AGENTS = {"shortcuts", "fetching"}
IN_FRONT = {"tiers", *WITH_AGENTS}
LEAST_SHORTCUTS = 150
LEAST_FETCHED = 150

# Files that --quick runs: parts of nginx that the module uses or affects.
QUICK = """proxy*.t upstream*.t http_*.t fastcgi*.t uwsgi*.t scgi*.t ssi*.t gzip*.t gunzip*.t sub_filter*.t range*.t
slice.t not_modified*.t limit_rate*.t image_filter*.t access_log*.t headers.t addition*.t charset*.t mirror*.t
post_action*.t auth_request*.t realip*.t trailers.t binary_upgrade.t worker_shutdown*.t""".split()

# Differences that are meant, as (file, number of the assertion): reason. EXPECTED holds for the variants with agents,
# EXPECTED_WITHOUT_AGENT for the variant relaying.
LONGER_REQUEST = "the request has Shunt-Consent in it, and its length a digit more"
NOTHING_CAME = "what came from the upstream is a header without a body"
NO_AGENT = "the error log, which is to be empty, says that there is no agent"
EXPECTED = {
    ("proxy_variables.t", 3): LONGER_REQUEST,
    ("proxy_variables.t", 4): LONGER_REQUEST,
    ("trailers.t", 16): NOTHING_CAME,
}
EXPECTED_WITHOUT_AGENT = {
    ("memcached_fake.t", 3): NO_AGENT,
    ("proxy_keepalive.t", 49): NO_AGENT,
}

# Files that get no tiers, because they would hang behind any proxy: they count client connections that are open at the
# same time.
NOT_IN_FRONT = {"upstream_max_conns.t"}

# Reason for differences between plain and tiers; Shunt has no part in it.
PROXIED = "two proxies in front change it, with Shunt or without"

RELAYING = """
shunt_agent {dir}/shuntd.sock;
shunt on; shunt_trust all; shunt_offer on; shunt_offer_min_length 1;
"""
# The suite's server is the backend behind the intermediate. If it proxies to itself, it is an intermediate, too.
BACKEND = """
shunt_agent {tiers.backend.directory}/agent.sock;
shunt_trust {trusted} 127.0.0.1 ::1 unix:;
shunt_offer on; shunt_offer_min_length 1;
"""


# ---- one test file ----

def sendfile(suite, name):
    """Returns the directive that switches sendfile on, because only a file that nginx would send with
    sendfile is offered. Returns nothing for a test file that has the directive already, because a second one would be
    an error."""
    with open(f"{suite}/{name}", errors="replace") as f:
        return "" if "sendfile" in f.read() else "sendfile on;\n"


def directives(variant, directory):
    if variant == "relaying":
        return RELAYING.format(dir=directory)
    if variant in WITH_AGENTS:
        ours = own_tiers()
        return BACKEND.format(tiers=ours, trusted=ours.intermediate.address())
    return ""


def own_tiers(made=[]):
    """Returns the lab of this process of the pool. It is made for the first file that needs it, and ends with the
    process."""
    if not made:
        made.append(tiers.Tiers())
    made[0].check()
    return made[0]


def command(variant, name, environment):
    """Returns the command that runs the file, with the tiers in front of its servers if the variant has any."""
    if variant not in IN_FRONT:
        return ["perl", "-I", "lib", name]
    ours = own_tiers()
    client = ours.frontend if variant == "fetching" else ours.client
    if name in NOT_IN_FRONT:
        return ours.backend.command(["perl", "-I", "lib", name])
    environment.update(ours.environment(client, with_shunt=variant != "tiers"))
    return ours.backend.command(["perl", "-I", "lib", "-I", HERE, "-MInFront", name])


def run_file(job):
    variant, name, options = job
    directory = tempfile.mkdtemp(prefix="shunt-nginx-tests-")
    os.chmod(directory, 0o755)
    environment = nginx_suite.environment(directory, options["modules"])
    nginx_suite.wrapper(directory + "/nginx", "env", options["version"])
    if variant not in ("plain", "tiers"):
        environment["TEST_NGINX_GLOBALS"] += f"load_module {tiers.MODULE};\n"
    environment["TEST_NGINX_GLOBALS_HTTP"] = sendfile(options["suite"], name) + directives(variant, directory)
    perl = command(variant, name, environment)
    before = own_tiers().counters() if variant in WITH_AGENTS else {}
    result = Result(*finished(started(perl, options["suite"], environment), TIMEOUT))
    if variant in WITH_AGENTS:
        result.counters = {name: now - before[name] for name, now in own_tiers().counters().items()}
    shutil.rmtree(directory, ignore_errors=True)
    return variant, name, result


def run(jobs, processes, report):
    results = {}
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for variant, name, result in pool.imap_unordered(run_file, jobs, 1):
            results[variant, name] = result
            report(len(results), len(jobs))
    return results


# ---- the comparison ----

def expected(variant, name, lines):
    """Returns lines that differ, with their reasons, or None if a line is not expected."""
    known = {"loaded": {}, "relaying": EXPECTED_WITHOUT_AGENT}.get(variant, EXPECTED)
    reasons = {n: PROXIED if variant == "tiers" else known.get((name, n)) for n in lines}
    if not all(reasons.values()):
        return None
    return {n: f"{line}; {reasons[n]}" for n, line in lines.items()}


class Comparison:
    """Differences by (variant, file): those that are meant, those that are gone when the file is run again alone, and
    the others."""

    def __init__(self, results, variants, options):
        self.meant, self.unsteady, self.wrong = {}, {}, {}
        for key in sorted(k for k in results if k[0] != "plain" and k[0] in variants):
            lines = differences(results[COMPARED[key[0]], key[1]], results[key])
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
            again = run([(COMPARED[variant], name, options), (variant, name, options)], 1, lambda *_: None)
            lines = differences(again[COMPARED[variant], name], again[variant, name])
            if not lines or expected(variant, name, lines):
                return False
        return True


# ---- preparation ----

def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog="""
examples:
  nginx/t/nginx-tests.py                        everything, ten to twenty minutes on two cores
  nginx/t/nginx-tests.py --quick                proxying, filters, ranges, caches: half of that
  nginx/t/nginx-tests.py 'proxy_cache*' -v      these files, and the output of those that differ
  nginx/t/nginx-tests.py --suite ~/nginx-tests  a copy of the suite, without network

exit status: 0 no difference, 1 a difference that EXPECTED does not have or too few shortcuts, 2 it could not run.
NO_COLOR in the environment turns colours off.""")
    p.add_argument("files", nargs="*", metavar="PATTERN", help="test files, such as proxy.t or 'ssi*'; default: all")
    p.add_argument("--quick", action="store_true",
                   help="only what the module has to do with, and no variant \"loaded\"")
    p.add_argument("--suite", metavar="DIR", help="a copy of the suite; default: fetched into target/")
    p.add_argument("--modules", metavar="DIR", help="where nginx's dynamic modules are; default: where nginx says")
    p.add_argument("--only", metavar="VARIANT", action="append", choices=VARIANTS[1:],
                   help="of the variants only this one and what it is compared with; may be repeated")
    p.add_argument("-j", "--jobs", type=int, default=os.cpu_count(), help="test files at a time; default: one a core")
    p.add_argument("-v", "--verbose", action="store_true", help="the output of files that differ")
    return p.parse_args()


def chosen(a):
    """Returns the variants to run, each after the one that it is compared with."""
    wanted = set(a.only or VARIANTS)
    if a.quick and not a.only:
        wanted.remove("loaded")
    if os.geteuid() != 0 and wanted & IN_FRONT:
        print("SKIPPED tiers, shortcuts, fetching: hosts of the lab and agents take root")
        wanted -= IN_FRONT
    if wanted & WITH_AGENTS:
        wanted.add("tiers")
    return [v for v in VARIANTS if v in wanted | {"plain"}]


def prepare(a):
    if not os.path.exists(tiers.MODULE):
        raise Missing(f"{os.path.relpath(tiers.MODULE)} is missing; make -C nginx builds it")
    suite = nginx_suite.checkout(a.suite)
    names = nginx_suite.files(suite, a.files or (QUICK if a.quick else ["*"]))
    if not names:
        raise Missing("no test file has such a name")
    text, modules = nginx_suite.version(a.modules)
    return names, chosen(a), {"suite": suite, "modules": modules, "version": text}


# ---- report ----

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
    for v in [v for v in variants if v in WITH_AGENTS]:
        shown = "offers shortcuts fetched aborted fetch_failed".split()
        print(f"{v:12}" + ", ".join(f"{counted(results, v, k)} {k}" for k in shown), flush=True)


def counted(results, variant, counter):
    return sum(result.counters.get(counter, 0) for (v, _), result in results.items() if v == variant)


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
    summarize(results, names, variants)
    compared = Comparison(results, variants, options)
    paint = Paint()
    broken = [n for n in names if results["plain", n].text() not in ("ok", "skipped")]
    if broken:
        print(f"fails without the module too: {' '.join(broken)}")
    show("Differences that are meant:", compared.meant, paint.green, results, False)
    show("Different once, gone when run again alone:", compared.unsteady, paint.yellow, results, a.verbose)
    show("Differences:", compared.wrong, paint.red, results, a.verbose)
    wrong = [f"{n} difference{'s' * (n > 1)}"] if (n := len(compared.wrong)) else []
    if not a.files and not a.quick:
        least = {"shortcuts": ("shortcuts", LEAST_SHORTCUTS), "fetching": ("fetched", LEAST_FETCHED)}
        for variant, (counter, few) in least.items():
            if variant in variants and (n := counted(results, variant, counter)) < few:
                wrong.append(f"only {n} {counter} of at least {few}")
    verdict = paint.red(", ".join(wrong)) if wrong else paint.green("no difference that is not meant")
    print(f"\n{verdict}, {time.time() - started:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Missing as missing:
        print(f"nginx-tests.py: {missing}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
