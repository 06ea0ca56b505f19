"""Core of the test suite with this machine's versions, and the tests that take a GPU."""

from collections import Counter
from typing import Any

import pytest

from benchmarks.gpu.measurements import CORE, SMALL_CORE
from benchmarks.gpu.runner import FAILURE

# Warnings of versions that the suite does not know yet are not failures.
COMMON = ["-W", "default", "-p", "no:cacheprovider"]


class Outcomes:
    """Plugin of pytest that counts the tests that passed, failed and were skipped, and names those that failed."""

    def __init__(self) -> None:
        self.counts, self.failed = Counter[str](), list[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: by its call, or by the setup or teardown that failed or skipped it."""
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
            self.failed += [report.nodeid] if report.failed else []

    def row(self) -> dict[str, Any]:
        """Return the counts, with a failure if a test failed or none passed."""
        row: dict[str, Any] = {name: self.counts[name] for name in ("passed", "skipped")} | {"failed": self.failed}
        if self.failed:
            row[FAILURE] = f"{len(self.failed)} of {self.counts.total()} tests failed: {self.failed[0]}"
        elif not self.counts["passed"]:
            row[FAILURE] = "no test ran"
        return row


def core(smoke: bool) -> dict[str, Any]:
    """Run the core."""
    return tested(SMALL_CORE if smoke else CORE)


def gpu() -> dict[str, Any]:
    """Run the tests of the GPU; in a smoke run they run on a CPU device."""
    return tested(["tests/gpu", "-m", "gpu"])


def tested(arguments: list[str]) -> dict[str, Any]:
    """Run pytest, and return its outcomes."""
    outcomes = Outcomes()
    code = pytest.main([*COMMON, *arguments], plugins=[outcomes])
    # 1: tests failed; others: pytest itself did, such as on a file that it cannot import.
    failure = {} if code in (0, 1) else {FAILURE: f"pytest exits with code {int(code)}"}
    return outcomes.row() | failure
