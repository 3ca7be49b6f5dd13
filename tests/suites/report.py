"""The result of a suite: its cases, and the findings with their explanations."""

import sys
from fnmatch import fnmatchcase


class Report:
    """Counts cases and compares findings with explanations. An explanation has a pattern for the case, one for the finding, and a reason.

    Patterns have the syntax of `fnmatch`. A finding without an explanation fails the suite, and so does an explanation without a finding.
    """

    def __init__(self, suite, explanations):
        self.suite = suite
        self.explanations = explanations
        self.cases = set()
        self.failed = {}
        self.explained = {}
        self.used = set()

    def case(self, name, *findings):
        """Record a case with its findings."""
        if name in self.cases:
            raise SystemExit(f"{self.suite}: two cases have the name `{name}`")
        self.cases.add(name)
        for finding in findings:
            found = [one for one in self.explanations if fnmatchcase(name, one[0]) and fnmatchcase(finding, one[1])]
            self.used.update(found)
            (self.explained if found else self.failed).setdefault(name, []).append(finding)

    def end(self):
        """Print the result. Exit with 1 if a finding has no explanation, or if an explanation has no finding."""
        for name, findings in self.failed.items():
            for finding in findings:
                print(f"FAILED {name}: {finding}")
        unused = [one for one in self.explanations if one not in self.used]
        for case, finding, _ in unused:
            print(f"FAILED an explanation explains nothing: {case}: {finding}")
        explained = [name for name in self.explained if name not in self.failed]
        passed = len(self.cases) - len(self.failed) - len(explained)
        print(f"{self.suite}: {len(self.cases)} cases, {passed} passed, {len(explained)} explained, {len(self.failed)} failed", flush=True)
        if self.failed or unused or not self.cases:
            sys.exit(1)
