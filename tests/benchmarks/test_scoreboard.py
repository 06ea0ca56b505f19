"""Parts of the scoreboard: mutants of the project, kept results, and the alarms of other thresholds."""

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
def test_every_mutant_applies_to_the_source_and_is_valid_python(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert ast.dump(ast.parse(mutant.apply(text))) != ast.dump(ast.parse(text))
    assert (ROOT / mutant.tests[0]).is_file()


def test_names_of_mutants_are_unique() -> None:
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
    """Return a git repository with a package, which is also on PYTHONPATH, and tests; not all of it committed."""
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


@pytest.mark.large
@pytest.mark.parametrize(
    ("tests", "killed", "by"),
    [
        (["tests/test_mean.py"], True, "tests/test_mean.py::test_mean"),
        (["tests/test_mean.py", "-k", "here"], False, "all of its tests pass"),
        (["tests/test_mean.py", "-k", "broken"], False, "tests/test_mean.py::test_broken fails without the mutant too"),
        (["tests/test_mean.py", "-k", "other"], False, "pytest exits with code 5: "),
        (["ignored/test_mean.py"], False, "pytest exits with code 4: "),
    ],
    ids=["killed", "survives", "broken", "none", "ignored"],
)
def test_an_outcome_names_the_failing_test_or_why_the_mutant_survives(
    tests: list[str], killed: bool, by: str, repository: Path
) -> None:
    before = (repository / "package/__init__.py").read_text()
    (outcome,) = run_mutants(repository, [mutant(*tests)])
    assert (outcome.name, outcome.killed) == ("sum", killed)
    assert outcome.by.startswith(by)
    assert outcome.seconds > 0
    assert (repository / "package/__init__.py").read_text() == before


@pytest.mark.large
def test_a_mutant_that_breaks_the_import_is_not_killed(repository: Path) -> None:
    (outcome,) = run_mutants(repository, [mutant("tests", old="def mean", new="1 / 0\ndef mean")])
    assert not outcome.killed
    assert outcome.by.startswith("pytest exits with code 2: ")


@pytest.mark.large
def test_slow_tests_are_killed_with_their_child_processes(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = tmp_path / "alive"
    monkeypatch.setenv("ALIVE", str(alive))
    (outcome,) = run_mutants(repository, [mutant("tests/test_mean.py::test_slow")], limit=12)
    assert outcome == Outcome("sum", False, "pytest exits with code -9: timed out after 12 s", outcome.seconds)
    size = alive.stat().st_size
    time.sleep(0.5)
    assert alive.stat().st_size == size > 0


@pytest.mark.large
def test_the_source_is_restored_before_the_next_mutant(repository: Path) -> None:
    test = "tests/test_mean.py::test_mean"
    other = mutant(test, old="/ len(xs)", new="/ len(xs) / 1", name="sum of one")
    outcomes = list(run_mutants(repository, [mutant(test), other]))
    assert [(outcome.name, outcome.killed) for outcome in outcomes] == [("sum", True), ("sum of one", False)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old": "product"}, "mutant sum: package/__init__.py contains 'product' 0 times; must contain it once"),
        ({"old": "xs"}, "mutant sum: package/__init__.py contains 'xs' 3 times; must contain it once"),
    ],
)
def test_a_mutant_whose_old_text_does_not_occur_once_is_refused(change: dict, message: str, repository: Path) -> None:
    with pytest.raises(InputError, match=f"^{message}$"):
        next(run_mutants(repository, [mutant("tests", **change)]))


def test_results_are_read_back_from_the_file(tmp_path: Path) -> None:
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
    with pytest.raises(InputError, match=r"scores.jsonl: line 3 is not a result of the scoreboard"):
        Kept(file)


def test_a_folder_outside_a_git_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a git repository"):
        next(run_mutants(tmp_path, [mutant("tests")]))


def test_a_package_imported_from_outside_the_copy_is_refused(repository: Path) -> None:
    (repository / "sys.py").write_text("")  # Python's comes first
    elsewhere = Mutant("sum", "sys.py", "", "", ())
    with pytest.raises(InputError, match="not imported from the copy"):
        next(run_mutants(repository, [elsewhere]))


# ---- other thresholds

GRADIENT, WEIGHT = np.array([3.0, -4.0, 2.0]), np.array([1.0, 2.0, -1e-3])


def record(loss: Any = 2.0, local: Any = 1.0, gradient: Any = 1.0, weight: Any = 0.0) -> Record:
    """Return a step with losses `loss`, correct gradients times `local` and `gradient`, and weights off by `weight`."""
    return {
        "local_loss": {"loss": np.ones(2) * loss},
        "local_gradients": {"w": np.stack([GRADIENT, -GRADIENT]) * local},
        "gradients": {"w": GRADIENT * gradient},
        "params": {"w": WEIGHT + weight},
    }


def traces(step: int, free: dict[str, Any], forced: dict[str, Any], steps: int = 12) -> Traces:
    """Return correct runs with changes at one step, counted from 1."""

    def run(changes: dict[str, Any]) -> list[Record]:
        return [record(**changes if number == step else {}) for number in range(1, steps + 1)]

    return Traces(run({}), run(free), run(forced))


def test_correct_runs_raise_no_alarm() -> None:
    assert alarms(traces(1, {}, {})) == dict.fromkeys(METHODS, False)


# Name -> method, step, changes of free-running and forced jax as functions of x, and the threshold of x.
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


@pytest.mark.parametrize("name", THRESHOLDS)
def test_a_method_raises_an_alarm_just_above_its_threshold_and_not_below(name: str) -> None:
    method, step, changes, threshold = THRESHOLDS[name]
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
def test_a_method_ignores_what_it_does_not_compare(method: str, step: int, changes: tuple[dict, dict]) -> None:
    assert not alarms(traces(step, *changes))[method]


def test_a_shorter_run_is_compared_at_its_last_step() -> None:
    assert alarms(traces(3, {"loss": 90.0}, {}, steps=3))["rtol_1"]
    assert alarms(traces(3, {"weight": 1.0}, {}, steps=3))["allclose"]


def test_a_port_with_its_own_step_is_compared_by_the_stages_it_shows() -> None:
    wrong = {"pure_local_loss": {"loss": np.array([90.0, 90.0])}, "params": {"w": WEIGHT}}
    raised = alarms(Traces([record()], [wrong], [wrong]))
    assert {name for name in METHODS if raised[name]} == {"rtol_1", "means", "means_1e4", "forward_1e5"}
