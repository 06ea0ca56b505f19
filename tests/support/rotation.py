"""`python -m tests.support.rotation OUTPUT`: extend rotation.txt by what `make test OPTIONS=--durations=0` prints.

The tests of the list take longest without compiled programs, as in a fresh clone (`rm -r .venv/jax-programs`).
`make test` leaves them to CI's rotation, which runs all tests in four commits, so that a person waits minutes; what
they promise is shown in `make test` by `KEPT`, one or two tests for each promise.
"""

import re
import sys
from collections import Counter
from pathlib import Path

LIST = Path(__file__).parents[1] / "rotation.txt"
LEAST = 1.5  # seconds of a test function, with all its cases, from which it is in the list
# Folders, files and tests that stay in `make test` whatever they take.
KEPT = (
    "tests/equivalence/",
    "tests/end_to_end/test_train.py",
    "tests/end_to_end/test_parity_command.py",
    "tests/end_to_end/test_check.py::test_what_is_wrong_is_named_with_its_lines",
    "tests/end_to_end/test_patch.py::test_a_patch_makes_the_port_equal",
    "tests/end_to_end/test_processes.py::test_a_run_is_the_same_in_one_process_and_in_two",
    "tests/end_to_end/test_resume.py",
    "tests/end_to_end/test_trainers.py::test_losses_are_equal_to_six_digits",
    "tests/examples/test_plain_scripts.py",
    "tests/unit/nn/test_layers.py",
    "tests/unit/optim/test_optimizers.py",
    "tests/unit/step/test_replica_step.py",
    "tests/unit/test_english.py",
    "tests/unit/test_imports.py",
    "tests/unit/test_pitfalls.py",
    "tests/unit/test_private_parts.py",
)
TIME = re.compile(r"^([\d.]+)s (?:call|setup|teardown) +(tests/\S+?::\w+)")


def slow(text: str) -> list[str]:
    """Return the test functions that take long, from pytest's table of durations.

    >>> slow("9.5s call tests/a.py::test_b[1]\\n0.1s setup tests/a.py::test_c\\n9s call tests/equivalence/d.py::test_e")
    ['tests/a.py::test_b']
    """
    seconds: Counter[str] = Counter()
    for line in text.splitlines():
        if found := TIME.match(line):
            seconds[found[2]] += float(found[1])  # type: ignore[assignment]
    return sorted(name for name, took in seconds.items() if took >= LEAST and not name.startswith(KEPT))


if __name__ == "__main__":
    names = {*LIST.read_text().split(), *slow(Path(sys.argv[1]).read_text())}
    LIST.write_text("".join(f"{name}\n" for name in sorted(names)))
