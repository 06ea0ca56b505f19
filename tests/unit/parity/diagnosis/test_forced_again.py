"""A function of many calls that both sides write otherwise is found at one place, and then at all others."""

from collections.abc import Mapping
from functools import partial

import jax
import numpy as np
import torch
from jax import numpy as jnp
from torch import Tensor, nn

from jaxddp.parity.diagnosis.forced.causes import located_faults
from jaxddp.parity.diagnosis.forced.locate import Location
from jaxddp.parity.diagnosis.forced.torch_graph import TorchGraph
from jaxddp.parity.graph import Graph
from jaxddp.parity.jax_side.value_graph import graph_of
from jaxddp.parity.report.sentences import line

BLOCKS, EXAMPLES, TIME, WIDTH = 3, 3, 5, 4


class Blocks(nn.Module):
    """Linear layers, each after a rotation by angles that grow with the time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(turned_halves(x)))
        return x


def turned_halves(x: Tensor) -> Tensor:
    speeds = 10.0 ** -(torch.arange(0, WIDTH, 2, dtype=x.dtype) / WIDTH)
    angles = torch.outer(torch.arange(TIME, dtype=x.dtype), speeds)
    both = torch.cat((angles, angles), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * both.cos() + torch.cat((-second, first), dim=-1) * both.sin()


def turned_pairs(x: jax.Array) -> jax.Array:
    speeds = 10.0 ** (-jnp.arange(WIDTH // 2, dtype=x.dtype) / (WIDTH // 2))
    angles = jnp.outer(jnp.arange(TIME, dtype=x.dtype), speeds)[None]
    even, odd = x[..., ::2], x[..., 1::2]
    turned = even * jnp.cos(angles) - odd * jnp.sin(angles), even * jnp.sin(angles) + odd * jnp.cos(angles)
    return jnp.stack(turned, axis=-1).reshape(x.shape)


def torch_loss(model: Blocks, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"loss": nn.functional.leaky_relu(model(batch["x"]), 0.2).square().mean()}


def jax_loss(p: Mapping[str, jax.Array], batch: Mapping[str, jax.Array], slope: float = 0.2) -> jax.Array:
    x = batch["x"]
    for k in range(BLOCKS):
        x = x + jnp.tanh(turned_pairs(x) @ p[f"layers.{k}.weight"].T + p[f"layers.{k}.bias"][None, None])
    return jnp.square(jnp.where(x >= 0, x, slope * x)).mean()


def programs(slope: float) -> tuple[TorchGraph, Graph]:
    torch.manual_seed(0)
    model, x = Blocks().double(), np.random.default_rng(0).normal(size=(EXAMPLES, TIME, WIDTH))
    with jax.enable_x64(True):
        state = {name: jnp.asarray(x.numpy()) for name, x in model.state_dict().items()}
        graph = graph_of(partial(jax_loss, slope=slope), [state, {"x": jnp.asarray(x)}])
    return TorchGraph(model, torch_loss, {"x": torch.from_numpy(x)}), graph


def test_a_function_that_both_sides_write_otherwise_is_found_in_all_blocks() -> None:
    location = Location(*programs(0.2))
    assert [segment.joined is not None for segment in location.segments] == [True] * BLOCKS
    assert location.trials < 1500  # measured: 1148; 2025 if every block is searched as the first one is
    (fault,), _ = located_faults(*programs(0.2), [], {}, {}, lambda call: ())
    assert fault.text.code == ("turned_pairs(...)", "turned_halves(...)") and fault.text.places == BLOCKS


def test_a_number_after_it_is_named() -> None:
    faults, _ = located_faults(*programs(0.1), [], {}, {}, lambda call: ())
    assert [fault.text.code[0] for fault in faults if not fault.names] == ["turned_pairs(...)"]
    (names,) = (fault.names for fault in faults if fault.names)
    assert [line(name) for name in names] == ["leaky_relu's negative_slope 0.1, the reference has 0.2"]
