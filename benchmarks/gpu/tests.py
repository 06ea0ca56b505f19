"""Part `tests`: the core of the test suite with this machine's versions, and the tests that take a GPU."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu import part
from benchmarks.gpu.children import ChildFailed, run
from benchmarks.gpu.records import FAILURE, Record, Row

EQUIVALENCE = [f"tests/equivalence/test_{name}.py" for name in ("matrix", "equivalence", "accumulation", "buffers")]
CORE = ["tests/unit/step", "tests/unit/nn", *EQUIVALENCE]
SMALL_CORE = ["tests/unit/nn/test_torch_weights.py"]  # what XLA compiles differs in a smoke run
ON_GPU = ["tests/gpu", "-m", "gpu"]
# Warnings of versions that the suite does not know yet are no failures.
COMMON = ["-W", "default", "-p", "no:cacheprovider"]
RAN = (0, 1)  # exit codes of pytest after it has run all tests
TIMEOUT = 280.0


def measure(record: Record) -> None:
    """Run the core on CPU devices, and the tests of the GPU on what this run measures."""
    cpu = {"JAX_PLATFORMS": "cpu"}
    record.add("core, on CPU devices", lambda: _tested(SMALL_CORE if record.smoke else CORE, cpu))
    record.add("GPU against CPU", lambda: _tested(ON_GPU, cpu if record.smoke else {}))


def _tested(arguments: Sequence[str], env: dict[str, str]) -> Row:
    with tempfile.TemporaryDirectory(prefix="gpu-tests-") as folder:
        path = Path(folder, "junit.xml")
        run(["-m", "pytest", *COMMON, f"--junitxml={path}", *arguments], env, TIMEOUT, RAN)
        if not path.exists():
            raise ChildFailed("pytest wrote no report")
        return counts(path.read_text())


def counts(xml: str) -> Row:
    """Count the tests of a JUnit report that passed, failed and were skipped, and name those that failed.

    >>> counts('<testsuites><testsuite><testcase classname="a" name="b"><failure/></testcase></testsuite></testsuites>')
    {'tests': 1, 'failed': ['a::b'], 'skipped': 0, 'passed': 0, 'failure': '1 of 1 tests failed: a::b'}
    """
    cases = list(ElementTree.fromstring(xml).iter("testcase"))
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    row: Row = {"tests": len(cases), "failed": failed, "skipped": skipped, "passed": len(cases) - len(failed) - skipped}
    if failed:
        row[FAILURE] = f"{len(failed)} of {len(cases)} tests failed: {failed[0]}"
    elif not row["passed"]:
        row[FAILURE] = "no test ran"
    return row


if __name__ == "__main__":
    part.run("tests", measure)
