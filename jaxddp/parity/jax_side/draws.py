"""Record the random numbers that a jax loss or step draws, or take them from the batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial, wraps
from itertools import takewhile
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

import jax
from flax import linen, nnx
from jax import numpy as jnp
from jax.extend.core import get_opaque_trace_state

from jaxddp.data.batches import of_batches
from jaxddp.distributed.collectives import AXIS_NAME
from jaxddp.nn.losses import as_losses
from jaxddp.nn.plain import carries_state
from jaxddp.parity.held_types import HeldType, HeldTypes
from jaxddp.parity.jax_side.multi_loss_step import losses_alone, multi_loss_step
from jaxddp.parity.jax_side.set_parameters import computed, parameters_of
from jaxddp.parity.jax_side.side import pure_loss
from jaxddp.parity.jax_side.widened import noted_casts
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
)
from jaxddp.parity.private_parts import MAPPING, REPEATING
from jaxddp.parity.replaced_functions import replaced
from jaxddp.parity.user_code.homes import line_of_function
from jaxddp.program.losses import named_losses
from jaxddp.state import Params
from jaxddp.step.loops import primitives

Take = Callable[[str, Sequence[int], float | None], jax.Array]  # (kind, shape, probability of a 1) -> numbers
Functions = dict[str, Callable[..., Any]]

KEYS = {"PRNGKey", "clone", "fold_in", "key", "key_data", "key_dtype", "key_impl", "split", "wrap_key_data"}
SAMPLERS = {name: f for name, f in vars(jax.random).items() if isinstance(f, FunctionType) and name not in KEYS}
DRAWING = {"random_bits", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32"}  # primitives

OTHER = f"only {', '.join(SERVED)} numbers can be the same on both sides; make them an entry of the batch"
INSIDE = "it is drawn inside of a jit, scan, vmap or remat of the port, where all calls would get the same numbers"
OF_BATCHES = of_batches(lambda: None).__code__
UNSEEN = "call jax.random.normal, uniform or bernoulli by their names"


def draws_of(port: Port, types: HeldTypes | None = None) -> tuple[Draw, ...]:
    """Return the draws of the jax loss, or of the `jax_step` for a `torch_step`, for one micro-batch, in order.

    Args:
        port: the port.
        types: gets the types of the losses, those to which they are computed in 16 bits, and the parameters that the
            loss sets.
    """
    draws, written = list[Draw](), dict[str, Any]()
    types = types or HeldTypes()
    name, function = _drawing(port)

    @wraps(function)
    def noted(*arguments: Any, **more: Any) -> Any:
        draws.clear()  # a linen module is initialised by the loss, too
        before = parameters_of(arguments[0]) if name == "jax_loss" else {}  # a step keeps what it sets
        with replaced_samplers(_noting(arguments, draws)):
            returned = function(*arguments, **more)
        written.clear()
        written.update({path: x for path, x in parameters_of(arguments[0]).items() if x is not before.get(path, x)})
        with types.collecting("losses"):
            types.of["losses"] = _types_of_losses(port, function, returned)
        return returned

    port = replace(port, **{name: noted})  # type: ignore[arg-type]
    functional, local_loss = pure_loss(port, port.jax_model())
    loss: Callable[..., Any] = local_loss
    if port.jax_step is not None and port.torch_step is not None:
        loss = partial(losses_alone, multi_loss_step(functional, port.jax_step, port.jax_optimizer))
    batch = jax.tree.map(jnp.asarray, port.first_batch("jax"))

    def of_params(params: Params) -> Any:
        return jax.vmap(lambda _: loss(params, functional.buffers, batch), axis_name=AXIS_NAME)(jnp.zeros(1))

    with noted_casts() as casts:
        program = jax.make_jaxpr(of_params)(functional.params)
    types.casts = tuple(sorted(casts))
    types.written = tuple(written)
    if written:  # nnx.jit and nnx.remat set what they hand on, too
        with suppress(Exception):  # what is set may differ between replicas
            types.written = computed(lambda params: (of_params(params), dict(written))[1], functional.params)
    unseen = not any(draw.refused for draw in draws) and any(name in DRAWING for name, _ in primitives(program.jaxpr))
    return (*draws, *[Draw("number", (), refused=UNSEEN)] * unseen)


def _types_of_losses(port: Port, function: Callable[..., Any], returned: Any) -> dict[str, HeldType]:
    """Return the types of what a loss, or a `jax_step` for a `torch_step`, returns."""
    if port.torch_step is not None:
        losses = named_losses("jax_step", returned[1] if isinstance(returned, tuple) else returned)
    else:
        losses = {"loss": as_losses(returned[0] if carries_state(port.jax_loss) else returned).values}
    line = line_of_function(function)
    return {name: HeldType(x.dtype.name, line) for name, x in losses.items() if hasattr(x, "dtype")}


def serving(port: DrawnPort) -> DrawnPort:
    """Return the port with a jax loss, or a `jax_step`, that takes its random numbers from the batch."""
    name, function = _drawing(port)

    @wraps(function)
    def served_function(*arguments: Any, **more: Any) -> Any:
        *others, batch = arguments
        served = Served(batch, [pair.jax for pair in port.draws], "jax")
        with replaced_samplers(_samplers(lambda kind, shape, rate: served.take(kind, shape))):
            returned = function(*others, served.rest, **more)
        served.check()
        return returned

    return replace(port, **{name: served_function})  # type: ignore[arg-type]


def _drawing(port: Port) -> tuple[str, Callable[..., Any]]:
    """Return the name of the function that draws, and the function."""
    if port.torch_step is None or port.jax_step is None:
        return "jax_loss", port.jax_loss
    function: Any = port.jax_step
    if getattr(function, "__code__", None) is OF_BATCHES:
        function = function.__wrapped__
    # A jit around the step keeps its first trace, and the tracers of the numbers in it.
    jitted = hasattr(function, "lower") and hasattr(function, "__wrapped__")
    return "jax_step", of_batches(function.__wrapped__) if jitted else port.jax_step


def constant_draws() -> AbstractContextManager[None]:
    """Return a context in which all draws are constants, as in torch's `ConstantDraws`."""
    return replaced_samplers(_samplers(lambda kind, shape, rate: jnp.full(shape, CONSTANTS.get(kind, 0.5))))


def _noting(arguments: Sequence[Any], draws: list[Draw]) -> Functions:
    """Return samplers that note their draws, in a function of these arguments, of which the first may be a module."""
    modules = nnx.iter_modules(arguments[0]) if isinstance(arguments[0], nnx.Module) else ()
    names = {id(module): ".".join(map(str, path)) for path, module in modules}
    outside = get_opaque_trace_state(convention="jaxddp")

    def name_of(layer: Any) -> str | None:
        if isinstance(layer, linen.Module) and layer.scope is not None:
            return ".".join(layer.path)
        return names.get(id(layer))

    def note(kind: str, shape: Sequence[int], rate: float | None = None) -> jax.Array:
        inside = get_opaque_trace_state(convention="jaxddp") != outside and not _differentiates_only()
        refused = OTHER if kind not in SERVED else INSIDE if inside else ""
        draws.append(Draw(kind, tuple(shape), enclosing_layer(name_of), rate, refused))
        return jnp.full(shape, 0.5)

    def other(name: str, *args: Any, **kwargs: Any) -> Any:
        result = SAMPLERS[name](*args, **kwargs)
        note(name, jnp.shape(result))
        return result

    return {**{name: partial(other, name) for name in SAMPLERS}, **_samplers(note)}


def _differentiates_only() -> bool:
    """Return whether the draw is in no transformation of the function's but derivatives, which call it once."""
    within = takewhile(lambda frame: frame.f_code.co_name != "noted", calling())
    names = ((frame.f_code.co_name, frame.f_globals.get("__name__", "")) for frame in within)
    return not any(name == MAPPING or module.startswith(REPEATING) for name, module in names)


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


def keyed_samplers(note: Callable[[str, Sequence[int], Any], None]) -> Functions:
    """Return samplers that return constants, and note their draws as (kind, shape, key)."""
    drawn: list[tuple[str, Sequence[int]]] = []

    def take(kind: str, shape: Sequence[int], rate: float | None) -> jax.Array:
        drawn.append((kind, shape))
        return jnp.full(shape, 0.5)

    def noting(sampler: Callable[..., Any]) -> Callable[..., Any]:
        def sample(key: Any, *args: Any, **kwargs: Any) -> Any:
            drawn.clear()  # a draw with one possible result is none
            result = sampler(key, *args, **kwargs)
            for kind, shape in drawn:
                note(kind, shape, key)
            return result

        return sample

    return {name: noting(sampler) for name, sampler in _samplers(take).items()}


def _in_dtype(numbers: jax.Array, dtype: Any) -> jax.Array:
    """Cast to 16 bits if asked for; else keep the dtype of the run, which represents float32."""
    return numbers if dtype is None or jnp.finfo(dtype).bits > 16 else numbers.astype(dtype)


@contextmanager
def replaced_samplers(functions: Functions) -> Iterator[None]:
    """Replace functions of jax.random wherever a module holds them, and as methods of `nnx.Rngs` and its streams."""
    replacements = {name: _outside_of_init(SAMPLERS[name], function) for name, function in functions.items()}
    pairs = [(SAMPLERS[name], replacement) for name, replacement in replacements.items()]
    with replaced(pairs, _is_part_of_jax), ExitStack() as stack:
        for kind in (nnx.Rngs, nnx.RngStream):
            for name in functions.keys() & set(dir(kind)):
                stack.enter_context(mock.patch.object(kind, name, _method(replacements[name])))
        yield


def _is_part_of_jax(name: str, module: ModuleType) -> bool:
    return name.startswith(("jax.", "jaxlib.")) and module is not jax.random


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: function(self(), *args, **kwargs)


def _outside_of_init(sampler: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a sampler, except where linen initialises parameters, which it does within a call."""

    def draw(*args: Any, **kwargs: Any) -> Any:
        modules = ((frame.f_globals.get("__name__"), frame.f_code.co_name) for frame in calling())
        return (sampler if ("flax.core.scope", "param") in modules else replacement)(*args, **kwargs)

    return draw
