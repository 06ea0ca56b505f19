"""Draw the initial weights of a port's jax model under other keys."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core.primitives import random_seed_p

from jaxddp.nn.any_model import functional_of
from jaxddp.parity.case_interface import AnyPortCase
from jaxddp.parity.initial_draws import DrawnTensor, Seeds, drawn
from jaxddp.parity.jax_side.checked_step import side_of
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.port import Port, PortSource
from jaxddp.parity.processes import Tell


@dataclass(frozen=True)
class JaxInitialWeights:
    """A job that draws the initial weights of a port's jax model several times.

    Attributes:
        case: a port.
        source: makes the port, whose losses draw their own numbers.
        count: number of draws.
        seed: seed of NumPy's and torch's generators in the first draw.
    """

    case: AnyPortCase
    source: PortSource
    count: int
    seed: int = 0

    def run(self, tell: Tell) -> dict[str, DrawnTensor]:
        """Return the draws of the tensors that have a twin, under torch's names and in torch's layout."""
        seeds = Seeds(self.seed)
        # The check's runs make the model with x64 too, so that what they have compiled for it is used again.
        with jax.enable_x64(True), seeds.replacing(), other_keys(seeds):
            side, own = side_of(self.case), dict[str, tuple[int, ...]]()

            def tensors_of(port: Port) -> Arrays:
                tell("jax_model")
                batch = partial(port.first_batch, "jax")
                functional = functional_of(port.jax_model(), port.jax_loss, batch, port.no_twin)
                arrays = {**functional.params, **functional.buffers}
                own.update({name: x.shape for name, x in arrays.items()})
                return side.to_torch({name: np.asarray(x) for name, x in arrays.items()})

            tensors = drawn(self.source, tensors_of, seeds, self.count)
            shapes = dict(_own_shapes(own, side.to_torch))
            return {name: replace(x, own=shapes.get(name, ())) for name, x in tensors.items()}


def _own_shapes(
    shapes: Mapping[str, tuple[int, ...]], to_torch: Callable[..., Arrays]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors that are one array, with its shape."""
    for name, shape in shapes.items():
        tensors = to_torch({name: np.zeros(shape, bool)})
        if len(tensors) == 1 and all(x.size == math.prod(shape) for x in tensors.values()):
            yield next(iter(tensors)), shape


@contextmanager
def other_keys(seeds: Seeds) -> Iterator[None]:
    """Let all of jax's keys be made of other seeds while the body of the `with` statement runs.

    >>> seeds = Seeds(0)
    >>> with other_keys(seeds):
    ...     seeds.begin(1)
    ...     bool(jax.random.key(5) == jax.random.key(5)), bool(jax.random.key_data(jax.random.key(5))[1] == 5)
    (True, False)
    """
    bind = random_seed_p.bind

    def bound(value: Any, **parameters: Any) -> Any:
        kind = jnp.result_type(value)
        return bind(jnp.bitwise_xor(value, jnp.asarray(seeds.salt & jnp.iinfo(kind).max, kind)), **parameters)

    with mock.patch.object(random_seed_p, "bind", bound):
        yield
