"""Ports of ResNet-18, ViT, a VAE and DeepFM: right ones equal torch, broken ones differ by the mistake in them."""

import ast
from pathlib import Path

import pytest

from jaxddp.parity.checking import check
from jaxddp.parity.report.report import Report
from jaxddp.parity.workers import Workers

PORTS = Path(__file__).parents[2] / "examples" / "ports"
NAMES = ("resnet18", "vit", "vae", "recommender")
GLUE = 40  # lines at most

pytestmark = pytest.mark.large


def checked(name: str, file: str, workers: Workers) -> Report:
    return check(PORTS / name / file, world_size=2, steps=3, workers=workers)


@pytest.mark.parametrize("name", NAMES)
def test_right_ports_are_equal(name: str, workers: Workers) -> None:
    report = checked(name, "port.py", workers)
    assert report.verdict == "equal", str(report)
    assert not report.names and not report.unseen


@pytest.mark.parametrize("name", NAMES)
def test_the_glue_is_short(name: str) -> None:
    text = (PORTS / name / "port.py").read_text()
    docstring, *statements = ast.parse(text).body
    assert isinstance(docstring, ast.Expr)
    glue = [
        node for node in statements if not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "names")
    ]
    lines = [text.splitlines()[node.lineno - 1 : node.end_lineno] for node in glue]
    assert sum(bool(line.strip()) for of_node in lines for line in of_node) <= GLUE


@pytest.mark.parametrize(
    ("name", "stage", "fault", "says"),
    [
        ("resnet18", "local_loss", "same_padding", "padded 'SAME', (0, 1, 0, 1) in layer*.*.conv*"),
        ("vit", "update", "decay_mask", "also acts on blocks.*.attn.qkv.bias, cls_token, pos_embed, unlike"),
        ("recommender", "update", "coupled_decay", "weight decay is decoupled"),
    ],
)
def test_a_mistake_is_named(name: str, stage: str, fault: str, says: str, workers: Workers) -> None:
    (found,) = checked(name, "broken.py", workers).differences
    assert found.stage == stage and found.cause is not None, found
    assert found.cause.names == (fault,) and says in found.cause.says[0], found.cause


def test_a_wrong_standard_deviation_is_located_between_two_layers(workers: Workers) -> None:
    (found,) = checked("vae", "broken.py", workers).differences
    assert (found.stage, found.tensor, found.step, found.cause) == ("local_loss", "loss", 1, None), found
    assert found.layer is not None and (found.layer.torch, found.layer.before) == ("fc3", "fc22"), found
