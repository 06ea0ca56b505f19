"""examples/ports/*/: programs of reinforcement learning, several networks and optimizers in one `torch_step`.

Each port is equal, and the report on its broken twin ends at the mistake.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxddp.parity
from jaxddp.parity.report.report import Report
from jaxddp.parity.workers import Workers

PORTS = Path(__file__).parents[2] / "examples" / "ports"
MOST_LINES = 40

pytestmark = pytest.mark.large


@pytest.fixture(scope="module")
def pair() -> Iterator[Workers]:
    """Processes of two replicas for all checks of this module."""
    with Workers(2, "cpu") as workers:
        yield workers


def checked(file: str, workers: Workers) -> Report:
    return jaxddp.parity.check(PORTS / file, world_size=2, steps=3, workers=workers)


def lines_of_glue(path: Path) -> int:
    """Count the lines of a port file but for its docstring, its table of names, comments and blank lines."""
    body = ast.parse(text := path.read_text()).body
    tables = [node for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "names"]
    left_out = {number for node in (body[0], *tables) for number in range(node.lineno, (node.end_lineno or 0) + 1)}
    lines = [line.strip() for number, line in enumerate(text.splitlines(), start=1) if number not in left_out]
    return sum(bool(line) and not line.startswith("#") for line in lines)


@pytest.mark.parametrize("name", ["value_learning", "actor_critic"])
def test_a_port_is_equal_with_little_glue(name: str, pair: Workers) -> None:
    assert lines_of_glue(PORTS / name / "port.py") <= MOST_LINES
    report = checked(f"{name}/port.py", pair)
    assert report.verdict == "equal", report


def test_the_broken_value_learning_moves_its_target_network_too_fast(pair: Workers) -> None:
    (found,) = checked("value_learning/broken.py", pair).differences
    assert found.stage == "update" and found.step == 1 and found.tensor.startswith("target_network."), found
    assert found.cause is None and "no optimizer of torch holds it" in found.detail
    assert "199 times torch's" in found.detail  # 0.995 / 0.005


def test_the_broken_actor_critic_does_not_average_the_actors_gradients(pair: Workers) -> None:
    (found,) = checked("actor_critic/broken.py", pair).differences
    assert found.stage == "gradients" and found.tensor.startswith("actor."), found
    assert found.cause is not None and found.cause.names == ("no_sync",), found
