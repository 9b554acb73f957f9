"""Parses test results in TAP, and compares two runs of the same tests."""
import re


def parsed(output):
    """Returns {number: (state, description)}, and the reason why the whole file was skipped, or None."""
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
    """Result of one test file."""

    def __init__(self, output, status):
        self.assertions, self.skipped = parsed(output)
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


def differences(plain, other):
    """Returns {number: line} of the assertions that differ from the plain run. The number 0 is the file as a whole."""
    lines = {}
    for n in sorted(plain.assertions.keys() | other.assertions.keys()):
        a, b = plain.assertions.get(n), other.assertions.get(n)
        if (a and a[0]) != (b and b[0]):
            lines[n] = f"{n} \"{(a or b)[1]}\": {a[0] if a else 'missing'}, now {b[0] if b else 'missing'}"
    if plain.skipped != other.skipped or plain.ended != other.ended:
        lines[0] = f"{plain.text()}, now {other.text()}"
    return lines
