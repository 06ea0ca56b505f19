"""Loops over batches, and the programs for which XLA's CPU backend is slow.

XLA's CPU backend gives a convolution its fast path only outside of loops: in a `lax.scan`, even of length 1, it takes
10 to 25 times as long (jax#12868).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import jax
from jax import lax
from jax import numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

Carry = TypeVar("Carry")
Body = Callable[[Carry, Any], tuple[Carry, Any]]

CONVOLUTION = "conv_general_dilated"
# Pooling with `lax.reduce_window`, as in `nnx.max_pool`, and its gradient: two to three times slower than slices.
POOLING = {"reduce_window_max", "reduce_window_min", "reduce_window_sum", "select_and_scatter_add"}
LOOPS = {"scan", "while"}
ONE_PASS = "one_pass"  # scope of a loop that hides its single pass from XLA; names in the compiled program have it


def scan(body: Body[Carry], init: Carry, xs: Any) -> tuple[Carry, Any]:
    """Compute `lax.scan(body, init, xs)`, without a loop if there is one pass.

    Args:
        body: (carry, x) -> (carry, y), with y None or a tree of arrays.
        xs: leaves (K, ...), K at least 1.

    Returns:
        The last carry; the outputs of all passes, leaves (K, ...).

    >>> total, sums = scan(lambda total, x: (total + x, total + x), jnp.float32(0), jnp.arange(3.0))
    >>> print(total, sums)
    3.0 [0. 1. 3.]
    """
    return lax.scan(body, init, xs) if _length(xs) > 1 else _unrolled(body, init, xs)


def scan_alike(body: Body[Carry], init: Carry, xs: Any, never: jax.Array) -> tuple[Carry, Any]:
    """Compute `scan(body, init, xs)` on CPU with the bits of one pass that it has among several.

    XLA fuses a pass otherwise in a loop than outside of one, and takes a loop of one pass apart. On CPU one pass is
    therefore a loop whose number of passes XLA does not know, unless `body` is slow in loops.

    Args:
        never: a boolean that is False, which XLA cannot know.
    """
    if _length(xs) > 1:
        return lax.scan(body, init, xs)
    program, shapes = jax.make_jaxpr(body, return_shape=True)(init, _at(xs, 0))

    def traced(carry: Carry, x: Any) -> tuple[Carry, Any]:
        results: tuple[Carry, Any] = jax.tree.unflatten(
            jax.tree.structure(shapes), jaxpr_as_fun(program)(*jax.tree.leaves((carry, x)))
        )
        return results

    def looped(init: Carry, xs: Any) -> tuple[Carry, Any]:
        def one_pass(k: Any, state: Any) -> Any:
            # Without it XLA moves what does not depend on k out of the loop, all-reduces among it.
            k, inputs = lax.optimization_barrier((k, xs))
            carry, y = traced(state[0], jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, k, keepdims=False), inputs))
            return carry, jax.tree.map(lambda out, new: lax.dynamic_update_index_in_dim(out, new, k, 0), state[1], y)

        outputs = jax.tree.map(lambda y: jnp.zeros((1, *y.shape), y.dtype), shapes[1])
        with jax.named_scope(ONE_PASS):
            return lax.fori_loop(0, 1 + never, one_pass, (init, outputs))

    unrolled = partial(_unrolled, traced)
    return lax.platform_dependent(init, xs, cpu=unrolled if slow_in_loops(program) else looped, default=unrolled)


def scan_or_unroll(body: Body[Carry], init: Carry, xs: Any) -> tuple[Carry, Any]:
    """Compute `scan(body, init, xs)`, on CPU with all passes unrolled if `body` is slow in a loop."""
    if _length(xs) == 1 or not slow_in_loops(jax.make_jaxpr(body)(init, _at(xs, 0))):
        return scan(body, init, xs)
    return lax.platform_dependent(init, xs, cpu=partial(_unrolled, body), default=partial(lax.scan, body))


def slow_in_loops(program: ClosedJaxpr) -> bool:
    """Return whether XLA's CPU backend would compute `program` several times slower in a loop.

    >>> kernel, images = jnp.ones((8, 1, 3, 3)), jnp.ones((2, 1, 8, 8))
    >>> program = jax.make_jaxpr(lambda x: lax.conv(x, kernel, (1, 1), "SAME"))
    >>> slow_in_loops(program(images)), slow_in_loops(jax.make_jaxpr(jnp.dot)(jnp.ones(3), jnp.ones(3)))
    (True, False)
    """
    return any(name == CONVOLUTION for name, _ in primitives(program.jaxpr))


def slow_forms(program: ClosedJaxpr, loops: int) -> Iterator[str]:
    """Yield a line for each form in a model that XLA's CPU backend computes slowly, with what to use instead.

    Args:
        program: program whose loops of `scan_or_unroll` are branches of a conditional.
        loops: number of loops around the model.
    """
    found = list(primitives(program.jaxpr))
    if any(name in POOLING for name, _ in found):
        yield "the model pools with lax.reduce_window, which is slow on CPU; use jaxddp.layers.max_pool or avg_pool"
    convolutions = [enclosing for name, enclosing in found if name == CONVOLUTION and "cond" not in enclosing]
    if any(sum(name in LOOPS for name in enclosing) > loops for enclosing in convolutions):
        yield "the model computes convolutions in a loop, which is slow on CPU; use lax.scan(..., unroll=True)"


def primitives(jaxpr: Jaxpr, enclosing: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Iterate over the names of all primitives of a program, each with the names of those that enclose it."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        yield name, enclosing
        for inner in _inside(equation.params.values()):
            yield from primitives(inner, (*enclosing, name))


def product_flops(jaxpr: Jaxpr) -> float:
    """Count the floating-point operations of a program's matrix products and convolutions, loops included.

    The costliest branch of a conditional counts, and one pass of a loop without a known length.

    >>> def squared(x):
    ...     return lax.scan(lambda y, _: (y @ x, None), x, None, length=3)[0]
    >>> product_flops(jax.make_jaxpr(squared)(jnp.ones((4, 4))).jaxpr) == 3 * 2 * 4**3
    True
    """
    total = 0.0
    for equation in jaxpr.eqns:
        inner = [product_flops(one) for one in _inside(equation.params.values())]
        shapes: list[Any] = [getattr(value.aval, "shape", ()) for value in (*equation.invars, *equation.outvars)]
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            total += 2 * math.prod(shapes[-1]) * math.prod(shapes[0][axis] for axis in contracted)
        elif equation.primitive.name == CONVOLUTION:
            features = shapes[1][equation.params["dimension_numbers"].rhs_spec[0]]
            total += 2 * math.prod(shapes[-1]) * math.prod(shapes[1]) / features
        elif equation.primitive.name == "cond":
            total += max(inner)
        else:
            total += equation.params.get("length", 1) * sum(inner) if inner else 0
    return total


def _inside(values: Iterable[Any]) -> Iterator[Jaxpr]:
    for value in values:
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value
        elif isinstance(value, list | tuple):
            yield from _inside(value)


def _length(xs: Any) -> int:
    return len(jax.tree.leaves(xs)[0])


def _at(xs: Any, k: int) -> Any:
    return jax.tree.map(lambda x: x[k], xs)


def _unrolled(body: Body[Carry], init: Carry, xs: Any) -> tuple[Carry, Any]:
    carry, outputs = init, []
    for k in range(_length(xs)):
        carry, output = body(carry, _at(xs, k))
        outputs.append(output)
    return carry, jax.tree.map(lambda *ys: jnp.stack(ys), *outputs)
