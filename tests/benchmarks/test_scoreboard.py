"""What the scoreboard is made of: mutants of the project, and what other thresholds would have said."""

import ast
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.scoreboard.kept import Kept
from benchmarks.scoreboard.mutants import Mutant, Outcome, run_mutants
from benchmarks.scoreboard.others import METHODS, Traces, alarms
from benchmarks.scoreboard.score import Question, Score
from jaxddp.errors import InputError
from jaxddp.parity.records import Record
from tests.faults.mutants import MUTANTS

ROOT = Path(__file__).parents[2]

# ---- mutants


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_source_and_is_python(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert ast.dump(ast.parse(mutant.apply(text))) != ast.dump(ast.parse(text))
    assert (ROOT / mutant.tests[0]).is_file()


def test_mutants_have_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 25


TESTS = r"""
import subprocess, sys
from pathlib import Path
import package

def test_mean(): assert package.mean([1, 2, 6]) == 3
def test_here():
    code = "import package; print(package.__file__)"
    of_child = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True).stdout.strip()
    assert {{Path(file).parents[1] for file in (package.__file__, of_child)}} == {{Path.cwd()}} != {{Path({root!r})}}
    assert sys.dont_write_bytecode
def test_broken(): assert False
def test_slow():
    child = "import os, time\nwhile True: open(os.environ['ALIVE'], 'a').write('.'); time.sleep(0.05)"
    if package.mean([2, 2]) != 2:
        subprocess.run([sys.executable, "-c", child])
"""
SUM = "sum(xs) / len(xs)", "sum(xs)"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that Python would find in another place too, with its tests; not all of it committed."""
    root = tmp_path / "root"
    for name, text in {
        "package/__init__.py": "def mean(xs):\n    return sum(xs) / len(xs)\n",
        "tests/test_mean.py": TESTS.format(root=str(root)),
        "pytest.ini": "[pytest]\n",
        ".gitignore": "ignored/\n",
        "ignored/test_mean.py": "",
        "gone.py": "",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    subprocess.run(["git", "-C", str(root), "add", "package", "gone.py"], check=True)
    (root / "gone.py").unlink()
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    return root


def mutant(*tests: str, old: str = SUM[0], new: str = SUM[1], name: str = "sum") -> Mutant:
    return Mutant(name, "package/__init__.py", old, new, tests)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("tests", "killed", "by"),
    [
        (["tests/test_mean.py"], True, "tests/test_mean.py::test_mean"),
        (["tests/test_mean.py", "-k", "here"], False, "all of its tests pass"),
        (["tests/test_mean.py", "-k", "broken"], False, "tests/test_mean.py::test_broken fails without the mutant too"),
        (["tests/test_mean.py", "-k", "other"], False, "pytest ends with code 5: "),
        (["ignored/test_mean.py"], False, "pytest ends with code 4: "),
    ],
    ids=["killed", "survives", "broken", "none", "ignored"],
)
def test_what_becomes_of_a_mutant(tests: list[str], killed: bool, by: str, repository: Path) -> None:
    before = (repository / "package/__init__.py").read_text()
    (outcome,) = run_mutants(repository, [mutant(*tests)])
    assert (outcome.name, outcome.killed) == ("sum", killed)
    assert outcome.by.startswith(by)
    assert outcome.seconds > 0
    assert (repository / "package/__init__.py").read_text() == before


@pytest.mark.large
def test_a_mutant_that_cannot_be_imported_proves_nothing(repository: Path) -> None:
    (outcome,) = run_mutants(repository, [mutant("tests", old="def mean", new="1 / 0\ndef mean")])
    assert not outcome.killed
    assert outcome.by.startswith("pytest ends with code 2: ")


@pytest.mark.large
def test_tests_that_do_not_end_are_ended_with_all_that_they_started(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = tmp_path / "alive"
    monkeypatch.setenv("ALIVE", str(alive))
    (outcome,) = run_mutants(repository, [mutant("tests/test_mean.py::test_slow")], limit=12)
    assert outcome == Outcome("sum", False, "pytest ends with code -9: no end within 12 s", outcome.seconds)
    size = alive.stat().st_size
    time.sleep(0.5)
    assert alive.stat().st_size == size > 0


@pytest.mark.large
def test_one_mutant_does_not_outlive_itself(repository: Path) -> None:
    test = "tests/test_mean.py::test_mean"
    other = mutant(test, old="/ len(xs)", new="/ len(xs) / 1", name="sum of one")
    outcomes = list(run_mutants(repository, [mutant(test), other]))
    assert [(outcome.name, outcome.killed) for outcome in outcomes] == [("sum", True), ("sum of one", False)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old": "product"}, "mutant sum: package/__init__.py has 'product' 0 times; must be once"),
        ({"old": "xs"}, "mutant sum: package/__init__.py has 'xs' 3 times; must be once"),
    ],
)
def test_mutants_that_do_not_fit_are_refused(change: dict, message: str, repository: Path) -> None:
    with pytest.raises(InputError, match=f"^{message}$"):
        next(run_mutants(repository, [mutant("tests", **change)]))


def test_results_that_were_kept_are_known_again(tmp_path: Path) -> None:
    file = tmp_path / "scores.jsonl"
    kept = Kept(file)
    question = Question(object(), "eps_value", "mlp", "adam", 2, 10, (frozenset({"eps_value"}),))
    score = Score(question, "different", (("eps_value",), ()), (("update", 1, "w", ""),) * 2, 1, 2.5, {"means": True})
    outcome = Outcome("sum", True, "test_mean", 1.0)
    kept.add(("planted", "eps_value"), score)
    kept.add(("mutants", "sum"), outcome)
    again = Kept(file)
    assert again.score(("planted", "eps_value"), question) == score
    assert again.outcome(("mutants", "sum")) == outcome
    assert again.score(("pairs", "eps_value"), question) is None
    assert again.when() == kept.when() != ""
    file.write_text(file.read_text() + "{}\n")
    with pytest.raises(InputError, match=r"scores.jsonl: line 3 is no result of the scoreboard"):
        Kept(file)


def test_a_folder_that_is_no_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a git repository"):
        next(run_mutants(tmp_path, [mutant("tests")]))


def test_a_package_that_is_imported_from_elsewhere_is_refused(repository: Path) -> None:
    (repository / "sys.py").write_text("")  # Python's own comes first
    elsewhere = Mutant("sum", "sys.py", "", "", ())
    with pytest.raises(InputError, match="not imported from the copy"):
        next(run_mutants(repository, [elsewhere]))


# ---- other thresholds

GRADIENT, WEIGHT = np.array([3.0, -4.0, 2.0]), np.array([1.0, 2.0, -1e-3])


def record(loss: Any = 2.0, local: Any = 1.0, gradient: Any = 1.0, weight: Any = 0.0) -> Record:
    """A step in which losses are `loss`, gradients so many times right, and weights so much too large."""
    return {
        "local_loss": {"loss": np.ones(2) * loss},
        "local_gradients": {"w": np.stack([GRADIENT, -GRADIENT]) * local},
        "gradients": {"w": GRADIENT * gradient},
        "params": {"w": WEIGHT + weight},
    }


def traces(step: int, free: dict[str, Any], forced: dict[str, Any], steps: int = 12) -> Traces:
    """Right runs but for one step, counted from 1."""

    def run(changes: dict[str, Any]) -> list[Record]:
        return [record(**changes if number == step else {}) for number in range(1, steps + 1)]

    return Traces(run({}), run(free), run(forced))


def test_right_runs_raise_no_alarm() -> None:
    assert alarms(traces(1, {}, {})) == dict.fromkeys(METHODS, False)


# Method, step, and a change on either side of the threshold: of jax by itself, and forced.
THRESHOLDS: dict[str, tuple[str, int, Callable[[float], tuple[dict, dict]], float]] = {
    "a loss at the tenth step": ("rtol_1", 10, lambda x: ({"loss": 2 + 2 * x}, {}), 1.0),
    "a gradient's norm": ("rtol_1", 10, lambda x: ({}, {"gradient": 1 + x}), 1.0),
    "the mean loss": ("means", 3, lambda x: ({}, {"loss": 2 * (1 + x)}), 1e-7),
    "the mean gradient": ("means", 3, lambda x: ({}, {"gradient": 1 + x}), 1e-7),
    "the mean weight": ("means", 3, lambda x: ({}, {"weight": x * WEIGHT.mean()}), 1e-7),
    "the mean loss, absolutely": ("means_1e4", 3, lambda x: ({}, {"loss": 2 + x}), 1e-4 + 2e-7),
    "the first loss": ("forward_1e5", 1, lambda x: ({"loss": 2 - x}, {}), 1e-5),
    "the first loss beside a NaN": ("forward_1e5", 1, lambda x: ({"loss": [np.nan, 2 - x]}, {}), 1e-5),
    "local gradients": ("ten_percent", 3, lambda x: ({}, {"local": 1 - x}), 0.1),
    "gradients": ("ten_percent", 3, lambda x: ({}, {"gradient": 1 - x}), 0.1),
    "weights": ("ten_percent", 3, lambda x: ({}, {"weight": -x * WEIGHT}), 0.1),
    "a large weight": ("allclose", 12, lambda x: ({"weight": [0, x, 0]}, {}), 1e-8 + 2e-5),
    "a small weight": ("allclose", 12, lambda x: ({"weight": [0, 0, x]}, {}), 1e-8 + 1e-8),
}


@pytest.mark.parametrize("what", THRESHOLDS)
def test_thresholds(what: str) -> None:
    method, step, changes, threshold = THRESHOLDS[what]
    assert not alarms(traces(step, *changes(0.99 * threshold)))[method]
    assert alarms(traces(step, *changes(1.01 * threshold)))[method]


@pytest.mark.parametrize(
    ("method", "step", "changes"),
    [
        ("rtol_1", 9, ({"loss": 90.0}, {"gradient": 90.0})),  # before the last step
        ("rtol_1", 11, ({"loss": 90.0}, {"gradient": 90.0})),  # after it
        ("means", 3, ({}, {"weight": [1.0, -1.0, 0.0]})),  # another weight, the same mean
        ("means", 3, ({"weight": 1.0}, {"local": 2.0})),
        ("forward_1e5", 2, ({"loss": 90.0}, {"loss": 90.0})),
        ("forward_1e5", 1, ({"loss": np.nan, "weight": 1.0}, {"gradient": 90.0})),
        ("ten_percent", 3, ({"weight": 9.0}, {"loss": 9.0})),
        ("allclose", 11, ({"weight": 9.0}, {"weight": 9.0})),
    ],
)
def test_what_a_method_does_not_look_at(method: str, step: int, changes: tuple[dict, dict]) -> None:
    assert not alarms(traces(step, *changes))[method]


def test_a_run_of_fewer_steps_is_compared_at_its_last() -> None:
    assert alarms(traces(3, {"loss": 90.0}, {}, steps=3))["rtol_1"]
    assert alarms(traces(3, {"weight": 1.0}, {}, steps=3))["allclose"]


def test_a_port_with_its_own_step_is_judged_by_what_it_shows() -> None:
    wrong = {"pure_local_loss": {"loss": np.array([90.0, 90.0])}, "params": {"w": WEIGHT}}
    found = alarms(Traces([record()], [wrong], [wrong]))
    assert {name for name in METHODS if found[name]} == {"rtol_1", "means", "means_1e4", "forward_1e5"}
