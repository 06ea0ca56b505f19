"""Right ports whose halves are written differently have neither a difference nor a "beyond".

`python -m benchmarks.scoreboard --parts right` counts the false alarms.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.scoreboard.document import to_markdown
from benchmarks.scoreboard.kept import Kept
from benchmarks.scoreboard.right import RightScore, beside, score_beside
from jaxddp.parity.checking import check
from jaxddp.parity.report.report import Report
from jaxddp.parity.workers import Workers
from tests.faults.right import RightPort, ports_with_fault, right_ports, with_fault

NUMBER, FAMILIES, FRAMEWORKS = 100, 16, 6
FOLDER = Path(__file__).parent / "right"


@pytest.fixture(scope="module")
def pair() -> Iterator[Workers]:
    with Workers(2, "cpu") as workers:
        yield workers


def named(start: str) -> RightPort:
    """Return the port whose name begins so."""
    (port,) = (port for port in right_ports() if port.name.startswith(start))
    return port


def checked(port: Path, pair: Workers) -> Report:
    return check(port, numerics=False, workers=pair, tell=lambda line: None)


def test_the_ports_are_distinct_python_files_and_cover_families_and_frameworks_evenly() -> None:
    ports = right_ports()
    assert len({tuple(port.texts.values()) for port in ports}) == len({port.name for port in ports}) == NUMBER
    for port in ports:
        assert [*map(ast.parse, port.texts.values())], port.name
    families = Counter(port.name[3:].partition("/")[0] for port in ports)
    frameworks = Counter(port.styles["framework"] for port in ports)
    assert len(families) == FAMILIES and min(families.values()) >= 6
    assert len(frameworks) == FRAMEWORKS and min(frameworks.values()) >= 12


def test_the_ports_share_no_code_with_the_check() -> None:
    for path in FOLDER.glob("*.py"):
        nodes = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Import | ast.ImportFrom)]
        assert not [node for node in nodes if "parity" in ast.unparse(node)], path


# Every third port; the scoreboard has all of them.
@pytest.mark.one_in(33, first=1)
@pytest.mark.parametrize("port", right_ports()[::3], ids=lambda port: port.name)
def test_a_right_port_has_neither_a_difference_nor_a_beyond(port: RightPort, pair: Workers, tmp_path: Path) -> None:
    report = checked(port.write(tmp_path), pair)
    assert report.verdict == "equal", str(report)
    assert not report.differences and not report.beyond


# Every ninth port; the scoreboard has all of them.
@pytest.mark.one_in(12, first=4)
@pytest.mark.parametrize("port", [*ports_with_fault()][::9], ids=lambda port: port.name)
def test_a_fault_beside_what_is_written_differently_is_the_only_one(port: RightPort, pair: Workers) -> None:
    score = score_beside(port, pair)
    assert score.verdict == "alone", score.said


@pytest.mark.large
def test_a_number_that_the_port_states_is_named_and_not_a_fitted_one_that_does_the_same(pair: Workers) -> None:
    score = score_beside(with_fault(named("36")), pair)  # before a BatchNorm, whose eps 1e-5 / 1.21 gives the same
    assert "times 1.1" in score.said and "eps" not in score.said


def test_a_fault_is_not_the_only_one_beside_another(pair: Workers, tmp_path: Path) -> None:
    port = with_fault(named("03"))
    report = checked(port.write(tmp_path, FAULTS["03"][0]), pair)
    assert beside(port, report) == "several", str(report)


# Start of a port's name -> an edit of its JAX half, and the verdict that it gets.
FAULTS = {
    "03": (("num_groups=2", "num_groups=1"), "different"),
    "16": (("act(norm(fc1(x)))", "jnp.minimum(act(norm(fc1(x))), 5.0)"), "beyond"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("start", FAULTS)
def test_a_fault_in_a_right_port_is_found(start: str, pair: Workers, tmp_path: Path) -> None:
    edit, verdict = FAULTS[start]
    assert checked(named(start).write(tmp_path, edit), pair).verdict == verdict


def test_an_edit_of_a_port_must_fit_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 'no such text' 0 times"):
        named("03").write(tmp_path, ("no such text", ""))


def test_verdicts_are_kept_and_are_a_row_of_the_scoreboard(tmp_path: Path) -> None:
    score = RightScore("00_mlp/nnx", "beyond", "with 3 replicas: update, b", 4.0)
    Kept(tmp_path / "scores.jsonl").add(("right", score.name), score)
    assert Kept(tmp_path / "scores.jsonl").right(("right", score.name)) == score
    facts = dict.fromkeys(("command", "date", "hardware", "python", "jax", "flax", "optax", "torch"), "x")
    text = to_markdown({}, [], [], facts, {}, right=[score])
    assert (
        "| correct ports whose halves are written differently | 1 | 0 different, 1 beyond, 0 incomplete, 4.0 s" in text
    )
    assert "- 00_mlp/nnx: beyond: with 3 replicas: update, b" in text
