#!/usr/bin/env python3
"""Runs other projects' test suites without Shunt and under `shunt run`, and says what differs.

  nginx     nginx-tests (https://github.com/nginx/nginx-tests): what proxies, and what changes bodies
  haproxy   HAProxy's regression tests (reg-tests/), by vtest
  apache    Apache's test framework (https://github.com/apache/httpd-tests), by Apache::Test

Each suite runs against the installed program, three times:

  plain     without Shunt: the other two are compared with this
  server    the server under Shunt: its connections to itself are between two programs under Shunt
  all       everything under Shunt, also the suite's own clients and backends

Every single assertion is compared. A test that also fails without Shunt is no difference. A test that differs is run
again, alone, without Shunt and with it. It counts only if it differs each time, or if it hangs only under Shunt.
Differences that are meant are in each suite's EXPECTED, with their reasons.

This takes root. It starts its own agent, in its own control group, and runs each test in its own network namespace.
"""
import argparse, multiprocessing, os, sys, time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "../../../nginx/t")]
import apache, haproxy, nginx
from confined import Missing, own_network
from machine import Machine
from tap import differences

SUITES = {suite.NAME: suite for suite in (nginx, haproxy, apache)}
VARIANTS = ["plain", "server", "all"]
# Number of times that a test which differs is run again. Its difference counts only if it differs each time, because
# some tests have races, and fail every other time.
REPETITIONS = 4


# ---- running ----

class Runner:
    """Runs sessions (lists of test files of one suite), each in its own process with its own network."""

    def __init__(self, machine, prepared):
        self.machine, self.prepared = machine, prepared

    def session(self, job):
        suite, variant, names = job
        own_network()
        return suite, variant, SUITES[suite].run(self.machine, variant, names, self.prepared[suite])

    def run(self, jobs, processes):
        """Runs the jobs. Returns {(suite, variant, file): result}."""
        global runner
        runner = self
        results = {}
        with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
            self.collect(pool.imap_unordered(session, jobs, 1), len(jobs), results)
        return results

    @staticmethod
    def collect(sessions, total, results):
        for done, (suite, variant, found) in enumerate(sessions, 1):
            results.update({(suite, variant, name): result for name, result in found.items()})
            if sys.stderr.isatty():
                print(f"\r{done}/{total} ", end="", file=sys.stderr, flush=True)


# The Runner whose jobs a pool runs. The pool's processes inherit it.
runner = None


def session(job):
    return runner.session(job)


# ---- comparing ----

class Comparison:
    """Differences by (suite, variant, file), of three kinds: `meant`; `unsteady`, which were gone when the file ran
    again alone; and `wrong`, which are all others."""

    def __init__(self, results, again):
        self.meant, self.unsteady, self.wrong = {}, {}, {}
        for (suite, variant, name), result in sorted(results.items()):
            if variant == "plain":
                continue
            lines = differences(results[suite, "plain", name], result)
            key = suite, variant, name
            if not lines:
                continue
            if reasons := expected(suite, name, lines):
                self.meant[key] = reasons
            elif hung(results, key) or all(self.differs(again, key) for _ in range(REPETITIONS)):
                self.wrong[key] = lines
            else:
                self.unsteady[key] = lines

    @staticmethod
    def differs(again, key):
        suite, variant, name = key
        results = again(suite, ["plain", variant], name)
        lines = differences(results[suite, "plain", name], results[key])
        return bool(lines) and not expected(suite, name, lines)

    def word(self, key):
        if key in self.wrong:
            return "DIFFERENT"
        return "meant" if key in self.meant else "unsteady" if key in self.unsteady else ""


def hung(results, key):
    suite, _, name = key
    return "hung" in results[key].ended and "hung" not in results[suite, "plain", name].ended


def expected(suite, name, lines):
    """Returns the lines with the reasons for which they are meant, or None if one of them is not meant."""
    reasons = {n: SUITES[suite].EXPECTED.get((name, n)) for n in lines}
    if not all(reasons.values()):
        return None
    return {n: f"{line}; {reasons[n]}" for n, line in lines.items()}


# ---- the report ----

def table(results, compared, variants):
    print(f"\n{'file':56}" + "".join(f"{variant:>16}" for variant in variants))
    for suite, name in sorted({(suite, name) for suite, _, name in results}):
        words = [compared.word((suite, variant, name)) for variant in variants[1:]]
        row = "".join(f"{results[suite, variant, name].text():>16}" for variant in variants)
        print(f"{suite + ' ' + name:56}{row}  {next(filter(None, words), '')}".rstrip())
    print()
    for suite in sorted({suite for suite, _, _ in results}):
        for variant in variants:
            found = [result for (s, v, _), result in results.items() if (s, v) == (suite, variant)]
            states = [state for result in found for state, _ in result.assertions.values()]
            print(f"{suite:8} {variant:8} {len(found):4} files, {sum(r.text() == 'ok' for r in found):4} ok, "
                  f"{sum(r.skipped is not None for r in found):3} skipped, {len(states):5} assertions, "
                  f"{states.count('not ok'):4} failed")


def show(title, found, results, verbose):
    if found:
        print(f"\n{title}")
    for (suite, variant, name), lines in found.items():
        print(f"  {suite} {variant} {name}")
        for line in lines.values():
            print(f"      {line}")
        if verbose:
            print("      | " + results[suite, variant, name].output.replace("\n", "\n      | "))


def carried(machine):
    """Prints how many bytes programs have sent by reference and in other ways. A reference stands for bytes that stay
    in the agent's store. If no bytes went by reference, the run has tested nothing."""
    counted = machine.counted() or {}
    for name in "sent_real", "sent_by_reference", "received_absent", "fetched", "fetched_by_fault":
        total = sum(counters[name] for counters in counted.values())
        programs = ", ".join(program for program, counters in sorted(counted.items()) if counters[name])
        print(f"{name:18} {total:12} bytes, of {programs or 'nobody'}")


# ---- the command ----

def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog="""
examples:
  crates/run/suites/run.py                     all three suites, half an hour on two cores
  crates/run/suites/run.py --quick             a few files of each, three minutes
  crates/run/suites/run.py 'nginx:proxy_*' -v  these files, and the output of those that differ

exit status: 0 no difference that is not meant, 1 there is one, 2 it could not run.""")
    p.add_argument("suites", nargs="*", metavar="SUITE[:PATTERN]", help="default: all of all")
    p.add_argument("--quick", action="store_true", help="a few files of each suite")
    p.add_argument("--fetched", action="store_true", help="leave out, and say so, what has not been fetched")
    p.add_argument("--only", metavar="VARIANT", choices=VARIANTS[1:], help="beside plain only this one")
    p.add_argument("-j", "--jobs", type=int, default=os.cpu_count(), help="files at a time; default: one a core")
    p.add_argument("-v", "--verbose", action="store_true", help="the output of files that differ")
    return p.parse_args()


def chosen(a):
    """Returns the suites and files to run: {suite: patterns}."""
    found = {}
    for argument in a.suites or SUITES:
        name, _, pattern = argument.partition(":")
        if name not in SUITES:
            raise Missing(f"there is no suite {name}; there are {', '.join(SUITES)}")
        suite = SUITES[name]
        if a.fetched and not all(os.path.exists(copy) for copy in suite.COPIES):
            print(f"SKIPPED: {name}: its suite has not been fetched; make odb-suites fetches it")
            continue
        found.setdefault(name, []).extend([pattern] if pattern else suite.QUICK if a.quick else suite.FILES)
    return found


def main():
    a = parse_arguments()
    variants = ["plain", a.only] if a.only else VARIANTS
    began = time.time()
    asked = chosen(a)
    if not asked:
        return 0
    prepared = {name: SUITES[name].prepare() for name in asked}
    with Machine() as machine:
        runs = Runner(machine, prepared).run
        sessions = {name: SUITES[name].sessions(prepared[name], patterns) for name, patterns in asked.items()}
        if not all(sessions.values()):
            raise Missing("no test file has such a name")
        print(", ".join(f"{sum(map(len, s))} files of {name}" for name, s in sessions.items()) +
              f"; {', '.join(variants)}; {a.jobs} at a time", flush=True)
        jobs = [(name, variant, names) for name in sessions for variant in variants for names in sessions[name]]
        results = runs(jobs, a.jobs)
        compared = Comparison(results, lambda suite, variants, name: runs([(suite, v, [name]) for v in variants], 1))
        table(results, compared, variants)
        carried(machine)
    show("Differences that are meant:", compared.meant, results, False)
    show("Different once, gone when run again alone:", compared.unsteady, results, a.verbose)
    show("Differences:", compared.wrong, results, a.verbose)
    print(f"\n{len(compared.wrong) or 'no'} difference{'s' * (len(compared.wrong) != 1)} that "
          f"{'are' if len(compared.wrong) != 1 else 'is'} not meant, {time.time() - began:.0f} s")
    return 1 if compared.wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Missing as missing:
        print(f"run.py: {missing}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
