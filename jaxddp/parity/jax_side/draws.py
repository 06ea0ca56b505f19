"""Record the random numbers that a jax loss draws, or take them from the batch."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from types import FunctionType
from typing import Any
from unittest import mock

import jax
from flax import linen, nnx
from jax import numpy as jnp
from jax.extend.core import get_opaque_trace_state

from jaxddp.distributed.collectives import AXIS_NAME
from jaxddp.parity.jax_side.side import pure_loss
from jaxddp.parity.port import Port
from jaxddp.parity.port.draws import (
    CERTAIN,
    CONSTANTS,
    SERVED,
    Draw,
    DrawnPort,
    Served,
    calling,
    enclosing_layer,
    examples_of,
)
from jaxddp.step.loops import primitives

Take = Callable[[str, Sequence[int], float | None], jax.Array]  # (kind, shape, probability of a 1) -> numbers
Functions = dict[str, Callable[..., Any]]

KEYS = {"PRNGKey", "clone", "fold_in", "key", "key_data", "key_dtype", "key_impl", "split", "wrap_key_data"}
SAMPLERS = {name: f for name, f in vars(jax.random).items() if isinstance(f, FunctionType) and name not in KEYS}
DRAWING = {"random_bits", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32"}  # primitives

OTHER = f"only {', '.join(SERVED)} numbers can be the same on both sides; make them an entry of the batch"
INSIDE = "it is drawn inside of a jit, scan, vmap or remat of the port, where all calls would get the same numbers"
UNSEEN = "call jax.random.normal, uniform or bernoulli by their names"


def draws_of(port: Port) -> tuple[Draw, ...]:
    """Return the draws of the jax loss for one micro-batch, in order."""
    draws: list[Draw] = []

    @wraps(port.flax_loss)
    def noted(model: Any, *state_and_batch: Any) -> Any:
        draws.clear()  # a linen module is initialised by the loss, too
        with _replaced(_noting(model, draws)):
            return port.flax_loss(model, *state_and_batch)

    functional, loss = pure_loss(replace(port, flax_loss=noted), port.flax_model())
    batch = jax.tree.map(jnp.asarray, port.first_batch("jax"))
    of_replica = jax.vmap(lambda _: loss(functional.params, functional.buffers, batch), axis_name=AXIS_NAME)
    program = jax.make_jaxpr(of_replica)(jnp.zeros(1))
    unseen = not any(draw.refused for draw in draws) and any(name in DRAWING for name, _ in primitives(program.jaxpr))
    return (*draws, *[Draw("number", (), refused=UNSEEN)] * unseen)


def serving(port: DrawnPort) -> DrawnPort:
    """Return the port with a jax loss that takes its random numbers from the batch."""

    @wraps(port.flax_loss)
    def flax_loss(*arguments: Any) -> Any:
        *model, batch = arguments
        served = Served(batch, [pair.jax for pair in port.draws], "jax")
        with _replaced(_samplers(lambda kind, shape, rate: served.take(kind, shape))):
            loss = port.flax_loss(*model, examples_of(batch))
        served.check()
        return loss

    return replace(port, flax_loss=flax_loss)


def constant_draws() -> AbstractContextManager[None]:
    """Return a context in which all draws are constants, as in torch's `ConstantDraws`."""
    return _replaced(_samplers(lambda kind, shape, rate: jnp.full(shape, CONSTANTS.get(kind, 0.5))))


def _noting(model: Any, draws: list[Draw]) -> Functions:
    """Return samplers that note their draws."""
    modules = nnx.iter_modules(model) if isinstance(model, nnx.Module) else ()
    names = {id(module): ".".join(map(str, path)) for path, module in modules}
    outside = get_opaque_trace_state(convention="jaxddp")

    def name_of(layer: Any) -> str | None:
        if isinstance(layer, linen.Module) and layer.scope is not None:
            return ".".join(layer.path)
        return names.get(id(layer))

    def note(kind: str, shape: Sequence[int], rate: float | None = None) -> jax.Array:
        inside = get_opaque_trace_state(convention="jaxddp") != outside
        refused = OTHER if kind not in SERVED else INSIDE if inside else ""
        draws.append(Draw(kind, tuple(shape), enclosing_layer(name_of), rate, refused))
        return jnp.full(shape, 0.5)

    def other(name: str, *args: Any, **kwargs: Any) -> Any:
        result = SAMPLERS[name](*args, **kwargs)
        note(name, jnp.shape(result))
        return result

    return {**{name: partial(other, name) for name in SAMPLERS}, **_samplers(note)}


def _samplers(take: Take) -> Functions:
    """Return functions with the signatures of jax.random's samplers that get their numbers from `take`."""

    def normal(key: Any, shape: Sequence[int] = (), dtype: Any = None, **_: Any) -> jax.Array:
        real = dtype is None or jnp.issubdtype(dtype, jnp.floating)
        return _in_dtype(take("normal" if real else "complex normal", shape, None), dtype)

    def uniform(
        key: Any, shape: Sequence[int] = (), dtype: Any = None, minval: Any = 0.0, maxval: Any = 1.0, **_: Any
    ) -> jax.Array:
        return _in_dtype(minval + take("uniform", shape, None) * (maxval - minval), dtype)

    def bernoulli(key: Any, p: Any = 0.5, shape: Sequence[int] | None = None, *_: Any, **__: Any) -> jax.Array:
        shape = jnp.shape(p) if shape is None else shape
        rate = float(p) if isinstance(p, int | float) else None
        if rate in CERTAIN:
            return jnp.full(shape, bool(rate))
        return take("bernoulli", shape, rate) < (p if jnp.ndim(p) == 0 else jnp.broadcast_to(p, shape))

    return {"normal": normal, "uniform": uniform, "bernoulli": bernoulli}


def _in_dtype(numbers: jax.Array, dtype: Any) -> jax.Array:
    """Cast to 16 bits if asked for; else keep the dtype of the run, which stands for float32."""
    return numbers if dtype is None or jnp.finfo(dtype).bits > 16 else numbers.astype(dtype)


@contextmanager
def _replaced(functions: Functions) -> Iterator[None]:
    """Replace functions of jax.random wherever a module holds them, and as methods of `nnx.Rngs` and its streams."""
    known = {id(SAMPLERS[name]): _outside_of_init(SAMPLERS[name], f) for name, f in functions.items()}
    with ExitStack() as stack:
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith(("jax.", "jaxlib.")) and module is not jax.random:
                continue
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if id(value) in known:
                    stack.enter_context(mock.patch.object(module, name, known[id(value)]))
        for kind in (nnx.Rngs, nnx.RngStream):
            for name in functions.keys() & set(dir(kind)):
                stack.enter_context(mock.patch.object(kind, name, _method(known[id(SAMPLERS[name])])))
        yield


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: function(self(), *args, **kwargs)


def _outside_of_init(sampler: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a sampler, except where linen initialises parameters, which it does within a call."""

    def draw(*args: Any, **kwargs: Any) -> Any:
        modules = ((frame.f_globals.get("__name__"), frame.f_code.co_name) for frame in calling())
        return (sampler if ("flax.core.scope", "param") in modules else replacement)(*args, **kwargs)

    return draw
