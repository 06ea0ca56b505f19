"""Keys from which a port's jax loss draws its random numbers, at several places of a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jaxddp.distributed.collectives import AXIS_NAME, rank
from jaxddp.nn.dropout_rng import Place
from jaxddp.nn.functional import Functional, RandomLoss
from jaxddp.nn.losses import Batch
from jaxddp.nn.plain import PlainFunctional
from jaxddp.parity.case_interface import AnyPortCase
from jaxddp.parity.jax_side.draws import keyed_samplers, replaced_samplers
from jaxddp.parity.jax_side.side import losses_of_port, pure_loss
from jaxddp.parity.operations import SourceLine, calling_lines, lines_of_user
from jaxddp.parity.port import Port, PortSource
from jaxddp.parity.processes import Tell
from jaxddp.program import asks_for, bound
from jaxddp.state import Buffers, Params

STEPS = 4  # at which keys are compared
MAKERS = ("random.key(", "PRNGKey(", "rngs=")  # in a line that makes a key or hands one on


@dataclass(frozen=True)
class KeyedDraw:
    """A draw of a jax loss, with its keys.

    Attributes:
        kind, shape: see `Draw`.
        line: the user's line that makes its key or hands it on, or that draws; None: unknown.
        keys: its keys, (steps, micro-batches, replicas, ...), uint32.
    """

    kind: str
    shape: tuple[int, ...]
    line: SourceLine | None
    keys: np.ndarray


@dataclass(frozen=True)
class DrawKeys:
    """A job that returns the draws of a port's loss with their keys.

    Attributes:
        case: a port whose losses draw random numbers, the same on both sides.
        source: makes the port, whose losses draw their own.
    """

    case: AnyPortCase
    source: PortSource

    def run(self, tell: Tell) -> tuple[tuple[KeyedDraw, ...], bool]:
        """Run the loss at several places; return its draws, and whether it asks for a `key`."""
        tell("keys of random numbers")
        port, draws = self.source.port(), list[KeyedDraw]()
        with jax.enable_x64(True):
            return tuple(self._keyed(port, draws)), asks_for(port.jax_loss, "key")

    def _keyed(self, port: Port, draws: list[KeyedDraw]) -> list[KeyedDraw]:
        functional, loss = _placed_loss(port, draws)
        ranks = range(self.case.world_size)
        of_all = jax.jit(jax.vmap(loss, (None, None, 0, None), axis_name=AXIS_NAME))
        keys, buffers = [], functional.buffers
        for step in range(min(STEPS, self.case.steps)):
            of_ranks = [port.micro_batches(step, number, "jax") for number in ranks]
            of_step, first = [], 0
            for pieces in zip(*of_ranks, strict=True):
                place = Place(jnp.int32(step), jnp.int32(first))
                of_draws, after = of_all(functional.params, buffers, _stacked(pieces), place)
                buffers = jax.tree.map(lambda x: x[0], after)
                of_step.append(jax.device_get(of_draws))
                first += len(next(iter(pieces[0].values())))
            keys.append(of_step)
        return [
            replace(draw, keys=np.stack([np.stack([piece[k] for piece in of_step]) for of_step in keys]))
            for k, draw in enumerate(draws)
        ]


def _stacked(of_ranks: Sequence[Batch]) -> Batch:
    """Stack the ranks' batches; those of ranks that differ in shape have the first rank's in their place."""
    shapes = [{name: np.shape(x) for name, x in batch.items()} for batch in of_ranks]
    given = [batch if shape == shapes[0] else of_ranks[0] for batch, shape in zip(of_ranks, shapes, strict=True)]
    return {name: jnp.stack([jnp.asarray(batch[name]) for batch in given]) for name in given[0]}


def _placed_loss(port: Port, draws: list[KeyedDraw]) -> tuple[Any, Callable[..., Any]]:
    """Return the model's pure side, and (params, buffers, batch, place) -> (keys of the draws, new buffers).

    Args:
        draws: list that holds the draws, without their keys, once the function is traced.
    """
    keys: list[Any] = []

    def note(kind: str, shape: Sequence[int], key: Any) -> None:
        typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        keys.append(jax.random.key_data(key) if typed else key)
        draws.append(KeyedDraw(kind, tuple(shape), _line_of_key(), np.zeros(0)))

    original = port.jax_loss

    @wraps(original)
    def noted(*arguments: Any, **more: Any) -> Any:
        keys.clear()
        draws.clear()
        with replaced_samplers(keyed_samplers(note)):
            return original(*arguments, **more)

    port = replace(port, jax_loss=noted)
    functional, _ = pure_loss(port, port.jax_model())

    def loss(params: Params, buffers: Buffers, batch: Batch, place: Place) -> tuple[list[Any], Buffers]:
        key = jax.random.fold_in(jax.random.key(0), place.step)
        key = jax.random.fold_in(jax.random.fold_in(key, place.first), rank())
        if isinstance(functional, Functional):
            # Its keys are those of the model; an entry "valid" is the port's, not jaxddp's padding mask.
            made = functional.local_loss(lambda model, _: losses_of_port(port, model, batch), train=None)
            at_place = made.at(place) if isinstance(made, RandomLoss) else made
            _, after = at_place(params, buffers, {name: x for name, x in batch.items() if name != "valid"})
        elif isinstance(functional, PlainFunctional):
            given_key = bound(port.jax_loss, key=key)
            _, after = functional.local_loss(lambda *given: given_key(*given))(params, buffers, batch)
        else:
            given_key = partial(losses_of_port, port, key=key)
            _, after = functional.local_loss(lambda *given: given_key(*given))(params, buffers, batch)
        return [*keys], after

    return functional, loss


def _line_of_key() -> SourceLine | None:
    """Return the innermost user's line that makes a key or hands one to a model, else the innermost."""
    lines = lines_of_user(calling_lines())
    return next((line for line in lines if any(word in line.text for word in MAKERS)), next(iter(lines), None))
