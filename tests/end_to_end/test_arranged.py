"""Ports whose jax arrays are not one torch tensor each: the table is proposed, and faults behind it are named."""

from collections.abc import Callable
from pathlib import Path

import pytest

from jaxddp.parity.checking import check
from jaxddp.parity.port.names_block import with_names
from jaxddp.parity.report.report import Report
from jaxddp.parity.workers import Workers
from tests.support.arranged_ports import BY_HEAD, CONVNET, JOINT, SCANNED, SPLIT, TANH, attention, write
from tests.support.small_port import Change

Twice = Callable[..., tuple[Report, Report]]
PARTS = {f"blocks.Dense_{n}": f'part("h.{{}}.c_attn", {n}, of=3)' for n in range(3)}
SCAN = {
    "Embed_0": "wte",
    "position": "wpe",
    "blocks.LayerNorm_0": "h.{}.ln_1",
    "blocks.Dense_3": "h.{}.c_proj",
    "blocks.LayerNorm_1": "h.{}.ln_2",
    "blocks.Dense_4": "h.{}.up",
    "blocks.Dense_5": "h.{}.down",
    "LayerNorm_0": "ln_f",
    **PARTS,
}
PORTS = {
    "scan": (SCANNED, SCAN),
    "q, k, v": (attention(SPLIT), {f: f'part("qkv", {n}, of=3)' for n, f in enumerate("qkv")}),
    "by head": (attention(BY_HEAD), {f: f'part("qkv", {n}, of=3, heads=2)' for n, f in enumerate("qkv")}),
    "fused": (attention(JOINT), {"qkv": 'fused("q", "k", "v")'}),
}


@pytest.fixture
def twice(tmp_path: Path, workers: Workers) -> Twice:
    """Return a function that checks a port, writes the names that the check proposes, and checks again."""

    def checked(text: str, *changes: Change) -> tuple[Report, Report]:
        path = write(tmp_path, text, *changes)
        first = check(path, steps=3, workers=workers, numerics=False)
        path.write_text(with_names(path.read_text(), first.names))
        return first, check(path, steps=3, workers=workers, numerics=False)

    return checked


@pytest.mark.large
@pytest.mark.parametrize(("text", "names"), PORTS.values(), ids=PORTS)
def test_the_proposed_table_makes_a_right_port_equal(text: str, names: dict[str, str], twice: Twice) -> None:
    first, second = twice(text)
    assert (first.verdict, first.names, first.problems[0].where) == ("incomplete", names, "names"), first
    assert second.verdict == "equal" and not second.problems, second
    assert not second.names


@pytest.mark.large
@pytest.mark.parametrize(("text", "names"), PORTS.values(), ids=PORTS)
def test_a_fault_beside_the_arrangement_is_named(text: str, names: dict[str, str], twice: Twice) -> None:
    first, second = twice(text, TANH)
    assert first.names == names, first
    (found,) = second.differences
    assert found.cause is not None and found.cause.names == ("gelu_approximation",), second


FLATTENED = {"fc1": 'flattened("fc1", (3, 2, 3))'}


@pytest.mark.large
def test_an_image_flattened_in_another_order_is_a_difference_that_a_rule_removes(twice: Twice) -> None:
    first, second = twice(CONVNET)
    (found,) = first.differences
    assert found.cause is not None and found.cause.names == ("layout",), first
    assert first.names == FLATTENED and not first.problems
    assert "from jaxddp.parity import flattened" in str(first)
    assert second.verdict == "equal" and not second.names, second


@pytest.mark.large
def test_a_fault_behind_a_flattened_image_is_named(twice: Twice) -> None:
    first, second = twice(CONVNET, TANH)
    assert first.names == FLATTENED
    (found,) = second.differences
    assert found.cause is not None and found.cause.names == ("gelu_approximation",), second
    assert found.layer is not None
    assert (found.layer.torch, found.layer.before) == ("fc2", "fc1")
