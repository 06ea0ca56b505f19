"""examples/ports/: each port is equal, and the report on its broken twin ends at the mistakes.

Its folders hold programs after public ones, at real size, with little glue.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxddp.parity.checking import check
from jaxddp.parity.report.report import Report
from jaxddp.parity.report.sentences import sentences
from jaxddp.parity.workers import Workers

PORTS = Path(__file__).parents[2] / "examples" / "ports"
MOST_LINES = 40  # of glue; measured: 26 to 38


class Broken(NamedTuple):
    """What the report on a broken port says.

    Attributes:
        port: folder or file of the port.
        stage, tensor: the first difference; the tensor's name begins so.
        faults: names of the causes; "" if it is located only.
        says: part of the first cause's sentence, or of the detail.
        layers: last equal layer and first that differs; none if the stage has no layers.
    """

    port: str
    stage: str
    tensor: str
    faults: str
    says: str
    layers: tuple[str, str] | tuple[()] = ()


BROKEN = [
    Broken("decoder", "update", "", "warmup_start", "warm-up starts at 0, rising by 1e-5 a step"),
    Broken("fine_tune", "update", "", "decay_mask", "weight decay also acts on bert.encoder"),
    Broken("equinox_mlp_mixer", "local_loss", "loss", "label_smoothing", "0.101010101, the reference has 0.1"),
    Broken("functions", "local_loss", "loss", "dropout_rate", "dropout rate 0.8 instead of 0.2"),
    Broken("actor_critic", "gradients", "actor.", "no_sync", "every replica keeps its own gradient"),
    Broken(
        "residual_convnet",
        "local_loss",
        "loss",
        "same_padding batch_norm_momentum biased_variance",
        "padded 'SAME', (0, 1, 0, 1) in block2.conv1",
        ("block1", "block2.conv1"),
    ),
    Broken("transformer_encoder", "local_loss", "loss", "mean_per_rank", "a mean over each rank's elements"),
]
NAMES = [broken.port for broken in BROKEN]
FOLDERS = [name for name in NAMES if (PORTS / name).is_dir()]


@pytest.fixture(scope="module")
def pair() -> Iterator[Workers]:
    with Workers(2, "cpu") as workers:
        yield workers


def checked(name: str, broken: bool, workers: Workers) -> Report:
    if name in FOLDERS:
        return check(PORTS / name / ("broken.py" if broken else "port.py"), world_size=2, steps=3, workers=workers)
    # The convnet's rate falls after 5 steps.
    return check(PORTS / f"{name}{'_broken' * broken}.py", world_size=2, steps=8, workers=workers)


def test_every_port_is_in_the_table() -> None:
    files = {
        path.stem.removesuffix("_broken") for path in PORTS.glob("*.py") if not path.stem.startswith("tutorial")
    } - {"first_draft"}
    assert {path.parent.name for path in PORTS.glob("*/port.py")} | files == {*NAMES}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_glue_is_short(name: str) -> None:
    """Count a program's lines but for its docstring, its table of names, comments and blank lines."""
    body = ast.parse(text := (PORTS / name / "port.py").read_text()).body
    tables = [node for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "names"]
    left_out = {number for node in (body[0], *tables) for number in range(node.lineno, (node.end_lineno or 0) + 1)}
    lines = [line.strip() for number, line in enumerate(text.splitlines(), start=1) if number not in left_out]
    assert 10 < sum(bool(line) and not line.startswith("#") for line in lines) <= MOST_LINES


@pytest.mark.large
@pytest.mark.parametrize("name", NAMES)
def test_a_port_is_equal(name: str, pair: Workers) -> None:
    report = checked(name, False, pair)
    assert report.verdict == "equal", str(report)
    assert not report.names


@pytest.mark.large
@pytest.mark.parametrize("broken", BROKEN, ids=NAMES)
def test_the_report_on_a_broken_port_ends_at_the_mistakes(broken: Broken, pair: Workers) -> None:
    every = checked(broken.port, True, pair).differences
    assert [found.cause.names if found.cause else ("",) for found in every] == [(n,) for n in broken.faults.split(" ")]
    found = every[0]
    assert found.stage == broken.stage and found.tensor.startswith(broken.tensor), found
    assert broken.says in (sentences(found.cause)[0] if found.cause else found.detail)
    if broken.layers:
        assert found.layer is not None and (found.layer.before, found.layer.torch) == broken.layers
