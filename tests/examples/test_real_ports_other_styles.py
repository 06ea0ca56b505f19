"""examples/ports/*/: models of public repositories in linen, in 16 bits, in Equinox and as plain functions.

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
NAMES = ["decoder", "fine_tune", "equinox_mlp_mixer", "functions"]
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
    text = path.read_text()
    body = ast.parse(text).body
    left_out = [
        body[0],
        *(node for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "names"),
    ]
    numbers = {number for node in left_out for number in range(node.lineno, (node.end_lineno or 0) + 1)}
    lines = [line.strip() for number, line in enumerate(text.splitlines(), start=1) if number not in numbers]
    return sum(bool(line) and not line.startswith("#") for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_a_port_is_equal_with_little_glue(name: str, pair: Workers) -> None:
    assert lines_of_glue(PORTS / name / "port.py") <= MOST_LINES
    report = checked(f"{name}/port.py", pair)
    assert report.verdict == "equal", report


@pytest.mark.parametrize(
    ("name", "stage", "cause", "says"),
    [
        ("decoder", "update", "warmup_start", "warm-up starts at 0, rising by 1e-5 a step"),
        ("fine_tune", "update", "decay_mask", "weight decay also acts on bert.encoder.0.attention.self.key.bias"),
        ("equinox_mlp_mixer", "local_loss", "label_smoothing", "label smoothing 0.101010101, the reference has 0.1"),
        ("functions", "local_loss", "dropout_rate", "dropout rate 0.8 instead of 0.2"),
    ],
)
def test_the_mistake_in_a_broken_port_gets_its_name(
    name: str, stage: str, cause: str, says: str, pair: Workers
) -> None:
    (found,) = checked(f"{name}/broken.py", pair).differences
    assert found.stage == stage and found.cause is not None and found.cause.names == (cause,), found
    assert says in found.cause.says[0]
