"""Lift casts in a loss, for a run in float64.

The float64 run represents a program in float32, where a cast to float32 does nothing. So casts of integers are lifted,
and those that flax and jax make by themselves: layers whose `dtype` is float32, a softmax that attention computes in
float32. Casts that a port writes are lifted only if torch's loss makes such casts too: a cast on only one side may be
its fault, as in a variance from means in float32. The run in float32 compares the rounding to 16 bits.
"""

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar
from unittest import mock

import jax
import numpy as np
import optax
from jax import numpy as jnp
from jax.extend.core.primitives import conv_general_dilated_p, convert_element_type_p, dot_general_p, iota_p

from jaxddp.distributed.collectives import AXIS_NAME
from jaxddp.parity.private_parts import INTERNAL, LIBRARIES, RANDOM

Context = Callable[[], AbstractContextManager[Any]]
Result = TypeVar("Result")

# Primitive -> its parameter that is a dtype.
CASTS = {
    convert_element_type_p: "new_dtype",
    iota_p: "dtype",
    dot_general_p: "preferred_element_type",
    conv_general_dilated_p: "preferred_element_type",
}

PLUMBING = (*INTERNAL, "numpy.", "unittest.", "contextlib", "functools", __name__)


@contextmanager
def in_float64(
    casts: Collection[str] = (), integers: bool = True, libraries: tuple[str, ...] = LIBRARIES
) -> Iterator[None]:
    """Leave casts to narrower dtypes out of what is traced or computed in this context.

    Args:
        casts: names of the dtypes to which torch's loss casts; with any of them, casts to float32 are lifted too.
        integers: lift casts of integers; a table in float32 may then be given two dtypes, which jax refuses.
        libraries: modules whose casts to float32 are lifted, too.

    >>> with jax.enable_x64(True), in_float64(["float32"]):
    ...     print(jnp.float64(1).astype(jnp.float32) / 3, jnp.float64(1).astype(jnp.bfloat16) / 3)
    0.3333333333333333 0.333984
    """
    lifted = {jnp.dtype(name) for name in (*casts, *["float32"] * bool(casts))}
    kept = {jnp.dtype(name) for name in ("float16", "bfloat16")} - lifted
    with ExitStack() as stack:
        # A synonym of "highest": jax caches traces by this setting, so traces made here stay apart from all others.
        stack.enter_context(jax.default_matmul_precision("float32"))
        for primitive, key in CASTS.items():
            stack.enter_context(
                mock.patch.object(primitive, "bind", _widening(primitive.bind, key, lifted, kept, integers, libraries))
            )
        yield


@contextmanager
def noted_casts() -> Iterator[dict[str, str]]:
    """Note casts of real numbers to narrower dtypes: dtype -> the first line outside of flax and jax that makes one.

    >>> with jax.enable_x64(True), noted_casts() as casts:
    ...     x = jnp.float64(1).astype(jnp.bfloat16)
    >>> [*casts]
    ['bfloat16']
    """
    casts: dict[str, str] = {}
    bind = convert_element_type_p.bind

    def noting(operand: Any, **params: Any) -> Any:
        to, given = jnp.dtype(params["new_dtype"]), jax.dtypes.result_type(operand)
        floats = jnp.issubdtype(to, jnp.floating) and jnp.issubdtype(given, jnp.floating)
        if floats and to.itemsize < given.itemsize and not _draws():
            casts.setdefault(to.name, _line_of_user())
        return bind(operand, **params)

    with mock.patch.object(convert_element_type_p, "bind", noting):
        yield casts


def wide_optimizer(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """Return an optax transformation whose arrays in float32 are float64, as far as optax makes them.

    >>> with jax.enable_x64(True):
    ...     wide = wide_optimizer(optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation())
    ...     state = wide.update({"w": jnp.full(1, 1 / 3)}, wide.init({"w": jnp.ones(1)}), {"w": jnp.ones(1)})[1]
    >>> state.acc_grads["w"].dtype
    dtype('float64')
    """
    optimizer, context = optax.with_extra_args_support(optimizer), partial(in_float64, (), False, ("optax.",))

    def init(params: Any) -> Any:
        return jax.tree.map(lambda x: x.astype("float64") if is_narrow(x) else x, optimizer.init(params))

    return optax.GradientTransformationExtraArgs(init, within(context, optimizer.update))


def is_narrow(x: Any) -> bool:
    """Return whether an array, no single number, has the dtype float32."""
    return bool(getattr(x, "dtype", None) == jnp.float32 and jnp.ndim(x))


def within(context: Context, function: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap a function so that it runs within a context."""

    @wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Result:
        with context():
            return function(*args, **kwargs)

    return inside


def can_run(function: Callable[..., Any], *args: Any) -> bool:
    """Return whether jax can trace a replica's function: with some casts lifted, it may refuse mixed dtypes."""
    replicas = jax.vmap(lambda _, args: function(*args), (0, None), axis_name=AXIS_NAME)
    try:
        jax.eval_shape(replicas, np.zeros(1), args)
    except Exception:
        return False
    return True


def _widening(
    bind: Callable[..., Any],
    key: str,
    lifted: set[Any],
    kept: set[Any],
    integers: bool,
    libraries: tuple[str, ...],
) -> Callable[..., Any]:
    def wide(*operands: Any, **params: Any) -> Any:
        dtypes = [jax.dtypes.result_type(operand) for operand in operands]
        of_floats = any(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
        to_float32 = params[key] == jnp.float32
        lifts = params[key] in lifted or (to_float32 and ((integers and not of_floats) or _calls_from(libraries)))
        if lifts and kept.isdisjoint(dtypes) and not _draws():
            params |= {key: np.dtype("float64")}
        return bind(*operands, **params)

    return wide


def _frames() -> Iterator[tuple[str, FrameType]]:
    """Yield the module and the frame of each function on the call stack, the innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield f"{frame.f_globals.get('__name__')}.", frame
        frame = frame.f_back


def _callers() -> Iterator[str]:
    return (module for module, _ in _frames())


def _line_of_user() -> str:
    """Return the innermost line on the call stack that is the port's."""
    of_user = (frame for module, frame in _frames() if not module.startswith((*PLUMBING, "flax.", "jaxddp.")))
    frame = next(of_user, None)
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}: line {frame.f_lineno}"


def _draws() -> bool:
    """Return whether the caller draws random numbers, which keep their dtype; linen draws some to compare shapes."""
    return any(caller.startswith(RANDOM) for caller in _callers())


def _calls_from(libraries: tuple[str, ...]) -> bool:
    """Return whether the innermost caller outside of jax's internals is in one of some libraries."""
    for module in _callers():
        if module.startswith(libraries):
            return True
        if not module.startswith(PLUMBING):
            return False
    return False
