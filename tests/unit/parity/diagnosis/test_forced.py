"""Differences of two losses are located to the operations that get equal inputs and give other outputs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from torch import Tensor, nn
from torch.nn import functional as F

from jaxddp.parity import graph
from jaxddp.parity.diagnosis.forced.align import Aligner
from jaxddp.parity.diagnosis.forced.causes import located_faults
from jaxddp.parity.diagnosis.forced.hits import State
from jaxddp.parity.diagnosis.forced.torch_graph import TorchGraph
from jaxddp.parity.graph import Graph
from jaxddp.parity.jax_side import equations, value_graph
from jaxddp.parity.jax_side.value_graph import TracedLoss, graph_of
from jaxddp.parity.operations import SegmentText
from jaxddp.parity.report.sentences import sentence
from jaxddp.parity.varied import varied

BATCH, TIME, WIDTH, HEADS = 3, 5, 8, 2
Loss = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]


class Weights(nn.Module):
    """Weights of a small transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.up = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))


def torch_loss(model: Weights, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    x = batch["x"] * WIDTH**0.5
    q, k, v = model.qkv(model.norm(x)).view(BATCH, TIME, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(BATCH, TIME, WIDTH)
    x = x + model.scale * model.out(h)
    x = torch.cat([F.gelu(model.up(x)), x], -1)
    x[:, 0] *= 2.0
    return {"loss": F.smooth_l1_loss(x.mean(1), batch["y"], beta=0.5)}


def norm(x: jax.Array, p: Mapping[str, jax.Array], eps: float = 1e-5) -> jax.Array:
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + eps)
    return x * p["norm.weight"] + p["norm.bias"]


def heads(x: jax.Array) -> jax.Array:
    return x.reshape(BATCH, TIME, HEADS, -1)


def huber(difference: jax.Array, beta: float = 0.5) -> jax.Array:
    size = jnp.abs(difference)
    return jnp.where(size < beta, difference**2 / (2 * beta), size - beta / 2).mean()


def jax_loss(
    p: Mapping[str, jax.Array],
    batch: Mapping[str, jax.Array],
    *,
    factor: float = WIDTH**0.5,
    first: Callable[..., jax.Array] = norm,
    split: Callable[[jax.Array], Any] = lambda x: jnp.split(x, 3, -1),
    masked: Callable[[jax.Array], jax.Array] = lambda s: jnp.where(jnp.tril(jnp.ones(s.shape[-2:])) == 1, s, -1e30),
    share: Callable[[jax.Array], jax.Array] = jax.nn.softmax,
    scale: Callable[[jax.Array], jax.Array] = lambda scale: scale,
    joined: Callable[[jax.Array, jax.Array], jax.Array] = lambda up, x: jnp.concatenate([up, x], -1),
    twice: int = 0,
    error: Callable[[jax.Array], jax.Array] = huber,
) -> jax.Array:
    """Compute the loss in another way, with its pieces as arguments."""
    x = batch["x"] * factor
    q, k, v = map(heads, split(first(x, p) @ p["qkv.weight"].T + p["qkv.bias"]))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (WIDTH // HEADS) ** -0.5
    h = jnp.einsum("bhqk,bkhd->bqhd", share(masked(scores)), v).reshape(BATCH, TIME, WIDTH)
    x = x + scale(p["scale"]) * (h @ p["out.weight"].T + p["out.bias"])
    x = joined(jax.nn.gelu(x @ p["up.weight"].T + p["up.bias"], approximate=False), x)
    x = x.at[:, twice].multiply(2.0)
    return error(x.mean(1) - batch["y"])


@pytest.fixture(scope="module")
def reference() -> tuple[TorchGraph, dict[str, np.ndarray], dict[str, np.ndarray]]:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model = Weights().double()
    names = dict(model.named_parameters())
    with torch.no_grad():  # no two tensors are equal by chance
        for name, x in varied({name: x.numpy() for name, x in model.state_dict().items()}, names, "near").items():
            names[name].copy_(torch.from_numpy(x))
    batch = {"x": rng.normal(size=(BATCH, TIME, WIDTH)), "y": rng.normal(size=(BATCH, 2 * WIDTH))}
    loss = TorchGraph(model, torch_loss, {name: torch.from_numpy(x) for name, x in batch.items()})
    return loss, {name: x.detach().numpy() for name, x in model.named_parameters()}, batch


def read(reference: Any, needed: Sequence[int] = (), **pieces: Any) -> Graph:
    """Return the port's program; `needed`: see `ReadLoss`."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        arguments = [{name: jnp.asarray(x) for name, x in of.items()} for of in reference[1:]]
        return TracedLoss(lambda p, b: jax_loss(p, b, **pieces), arguments, needed).graph(arguments)


def segments_of(reference: Any, graph: Graph) -> tuple[SegmentText, ...]:
    return tuple(fault.text for fault in located_faults(reference[0], graph, [], {}, {}, lambda call: ())[0])


def segments(reference: Any, **pieces: Any) -> tuple[SegmentText, ...]:
    return segments_of(reference, read(reference, **pieces))


def test_a_loss_that_is_written_in_another_way_has_no_segments(reference: Any) -> None:
    assert segments(reference) == ()


def masked_after(scores: jax.Array) -> jax.Array:
    return jnp.where(jnp.tril(jnp.ones(scores.shape[-2:])) == 1, jax.nn.softmax(scores), 0.0)


VARIANCE = [
    "reduce_sum",
    "div 8",
    "sub",
    "reduce_sum",
    "div 8",
    "sub",
    "square",
    "reduce_sum",
    "div 8",
    "gt 8 0",
    "select_n nan",
]

# Pieces -> the operations of both sides, torch's and the port's, of each segment.
CASES: dict[str, tuple[dict[str, Any], list[tuple[list[str], list[str]]]]] = {
    "a factor left out": ({"factor": 1.0}, [(["mul 2.82843"], [])]),
    "another number": ({"factor": 8.0}, [(["mul 2.82843"], ["mul 8"])]),
    "a norm left out": ({"first": lambda x, p: x}, [(["layer_norm 1e-05"], [])]),
    "a small number": (
        {"first": lambda x, p: norm(x, p, 1e-9)},
        [(["layer_norm 1e-05"], [*VARIANCE, "add 1e-09", "sqrt", "div", "mul", "add"])],
    ),
    "an operation added": ({"scale": jnp.tanh}, [([], ["tanh"])]),
    "another order": ({"joined": lambda up, x: jnp.concatenate([x, up], -1)}, [(["cat"], ["concatenate"])]),
    "keys and values swapped": (
        {"split": lambda x: [jnp.split(x, 3, -1)[k] for k in (0, 2, 1)]},
        [([], ["split"])],
    ),
    "a mask after the softmax": (
        {"masked": lambda scores: scores, "share": masked_after},
        [(["masked_fill of the scores -inf"], ["select_n 0 1", "eq 1", "select_n 0"])],
    ),
    "another place that is written to": (
        {"twice": 1},
        [(["__getitem__", "mul_ 2", "written in place", "__setitem__"], ["scatter-mul 1 2"])],
    ),
    "another function": (
        {"error": lambda difference: jnp.square(difference).mean()},
        [(["smooth_l1_loss 0.5"], ["sub", "square", "reduce_sum", "div 48"])],
    ),
    "two faults": (
        {"factor": 8.0, "scale": jnp.tanh},
        [(["mul 2.82843"], ["mul 8"]), ([], ["tanh"])],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_located_to_its_operations(name: str, reference: Any) -> None:
    pieces, expected = CASES[name]
    found = segments(reference, **pieces)
    assert [([*one.torch], [*one.jax]) for one in found] == expected
    assert all(one.lines.torch and one.lines.jax for one in found)


@pytest.mark.parametrize("name", CASES)
def test_a_fault_of_a_large_program_is_located_by_its_first_values(
    name: str, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, constant, value in (
        (value_graph, "MOST_BYTES", 0),
        (equations, "MOST_SHOWN", 16),
        (graph, "MOST_NEEDED", 4500),
        (graph, "SMALL", 200),
    ):
        monkeypatch.setattr(module, constant, value)
    pieces, expected = CASES[name]
    by_moments = read(reference, **pieces)
    needed = graph.needed_values(by_moments, graph.operations_of(reference[0].graph))
    partial = read(reference, needed, **pieces)
    assert by_moments.is_partial and partial.is_partial
    assert sum(partial[k].size for k in needed) <= 4500
    found = segments_of(reference, partial)
    assert [([*one.torch], [*one.jax]) for one in found] == expected


def test_a_segment_has_the_values_that_differ_most(reference: Any) -> None:
    [segment] = segments(reference, factor=1.0)
    _, _, batch = reference
    place = np.unravel_index(np.abs(batch["x"]).argmax(), batch["x"].shape)
    assert segment.element == place
    np.testing.assert_allclose(segment.values, (batch["x"][place], batch["x"][place] * 8**0.5), rtol=1e-12)


def test_values_that_are_no_numbers_have_the_line_where_they_arise(reference: Any) -> None:
    def wrong(scale: jax.Array) -> jax.Array:
        return jnp.log(-scale)

    [segment] = segments(reference, scale=wrong)
    assert segment.jax[:2] == ("neg", "log") and np.isnan(segment.values[0])
    assert segment.lines.jax is not None and segment.lines.jax.text == "return jnp.log(-scale)"


@pytest.mark.parametrize(("add", "says"), [(0.0, []), (0.5, ["y of the batch has other values"])])
def test_an_entry_of_the_batch_with_other_values_is_named(add: float, says: list[str], reference: Any) -> None:
    loss, weights, batch = reference
    port = read((loss, weights, {**batch, "y": batch["y"] + add}))
    assert [
        fault.what and sentence(fault.what) for fault in located_faults(loss, port, [], {}, {}, lambda call: ())[0]
    ] == says


LENGTHS = np.array([3, 5, 2])


class Padded(nn.Module):
    """Weights of attention over words, of which some are padding, whose states are 0 in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.states, self.query = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.linspace(-1.0, 1.0, WIDTH))


def padded_in_torch(model: Padded, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    is_word = (torch.arange(TIME) < torch.from_numpy(LENGTHS)[:, None]).unsqueeze(-1)
    states = torch.tanh(model.states(batch["x"]) * is_word)
    share = (states @ model.query).masked_fill(~is_word.squeeze(-1), -torch.inf).softmax(-1)
    return {"loss": (states * share[..., None]).sum(1).square().sum(-1).exp().mean()}


def padded_in_jax(p: Mapping[str, jax.Array], batch: Mapping[str, jax.Array], first: float) -> jax.Array:
    """Return the loss without a mask before the softmax; a factor of the first word is 1 in torch."""
    factors = jnp.where(jnp.arange(TIME) == 0, first, 1.0)[None, :, None]
    states = jnp.tanh((batch["x"] * factors) @ p["states.weight"].T + p["states.bias"][None, None])
    share = jax.nn.softmax(states @ p["query"]) * (jnp.arange(TIME)[None] < LENGTHS[:, None])
    return jnp.exp(jnp.square(jnp.einsum("btw,bt->bw", states, share)).sum(-1)).mean()


@pytest.mark.parametrize(("first", "has_effect"), [(1.0, False), (2.0, True)], ids=["padding", "a word"])
def test_a_value_that_differs_in_part_is_the_ports_if_that_has_no_effect_on_torchs_loss(
    first: float, has_effect: bool
) -> None:
    torch.manual_seed(0)
    model, rng = Padded().double(), np.random.default_rng(0)
    batch, state = {"x": rng.normal(size=(BATCH, TIME, WIDTH))}, {k: x.numpy() for k, x in model.state_dict().items()}
    loss = TorchGraph(model, padded_in_torch, {k: torch.from_numpy(x) for k, x in batch.items()})
    with jax.enable_x64(True):
        arguments = [{k: jnp.asarray(x) for k, x in of.items()} for of in (state, batch)]
        aligner = Aligner(loss, graph_of(lambda p, b: padded_in_jax(p, b, first), arguments))
    before = aligner.start()
    after = State(aligner, before).in_effect()
    assert (after is None) == has_effect
    if after is not None:
        [(index, twin)] = after.forced.items()
        assert loss.graph[index].name == "tanh" and aligner.jax[twin.jax].name == "tanh"
        np.testing.assert_allclose(after.arrays[loss.graph.end], before.arrays[loss.graph.end], rtol=1e-14)


@pytest.mark.parametrize(
    ("returned", "name"),
    [(lambda loss: loss.detach(), "detach"), (lambda loss: torch.as_tensor(float(loss)).detach(), "sum")],
    ids=["a tensor", "a number"],
)
def test_a_loss_that_a_step_returns_ends_its_graph(returned: Callable[[Tensor], Tensor], name: str) -> None:
    x = {"x": torch.linspace(0.1, 0.9, 3)}
    loss = TorchGraph(nn.ReLU(), lambda model, batch: {"loss": returned((2 * model(batch["x"])).sum())}, x)
    assert loss.graph[loss.graph.end].name == name
    assert loss.graph[loss.graph.end].inputs


def test_a_number_that_no_call_has_computed_is_no_loss() -> None:
    with pytest.raises(ValueError, match="no call"):
        TorchGraph(nn.ReLU(), lambda model, batch: {"loss": torch.as_tensor(7.0)}, {"x": torch.ones(3)})


KEPT = np.array([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1], [1, 0, 0, 0, 1]], bool)


def kept_in_torch(model: Padded, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    kept = model.states(batch["x"])[torch.from_numpy(KEPT)]
    return {"loss": torch.exp(torch.tanh(kept * 0.5) @ model.query).mean()}


def weighted_in_jax(p: Mapping[str, jax.Array], batch: Mapping[str, jax.Array], factor: float) -> jax.Array:
    states = batch["x"] @ p["states.weight"].T + p["states.bias"][None, None]
    costs = jnp.exp(jnp.tanh(states * factor) @ p["query"])
    return (costs * KEPT).sum() / KEPT.sum()


@pytest.mark.parametrize(("factor", "expected"), [(0.5, []), (0.25, [(("mul 0.5",), ("mul 0.25",))])])
def test_rows_that_torch_keeps_are_among_those_that_the_port_weighs(
    factor: float, expected: list[tuple[tuple[str, ...], tuple[str, ...]]]
) -> None:
    torch.manual_seed(0)
    model, rng = Padded().double(), np.random.default_rng(0)
    batch, state = {"x": rng.normal(size=(BATCH, TIME, WIDTH))}, {k: x.numpy() for k, x in model.state_dict().items()}
    loss = TorchGraph(model, kept_in_torch, {k: torch.from_numpy(x) for k, x in batch.items()})
    with jax.enable_x64(True):
        arguments = [{k: jnp.asarray(x) for k, x in of.items()} for of in (state, batch)]
        port = graph_of(lambda p, b: weighted_in_jax(p, b, factor), arguments)
    found, _ = located_faults(loss, port, [], {}, {}, lambda call: ())
    assert [(fault.text.torch, fault.text.jax) for fault in found] == expected
