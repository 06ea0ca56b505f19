"""Digest of a traced JAX program: equal digests mean the same program, whatever its text.

A value's digest is the hash of the operation that computes it and of the digests of its operands. Unused operations
and the order and names of the others therefore do not count; the same operation computed twice counts as once.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

COMMUTATIVE = frozenset({"add", "mul", "max", "min", "and", "or", "xor", "eq", "ne", "add_any"})
# Operations that call another program, and the parameter that holds it.
CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
CALLING = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}
)
# Parameters without an effect on the result: names, and derivatives that the trace has already used.
IGNORED = frozenset(
    {"name", "debug_info", "jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "symbolic_zeros", "inline"}
    | {"in_shardings", "out_shardings", "in_layouts", "out_layouts", "donated_invars", "ctx_mesh", "keep_unused"}
)
# Exact for every number, -0.0 and NaN included: operation -> the operand that does nothing on the right.
NEUTRAL = {"mul": 1, "div": 1, "sub": 0}


def hashed(*parts: object) -> str:
    """Return the hash of the parts' text."""
    return hashlib.sha256("\x00".join(map(str, parts)).encode()).hexdigest()[:24]


def array_digest(value: Any) -> str:
    """Return the hash of an array's type, shape and bytes; a typed key counts by its data."""
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return hashed("key", array_digest(jax.random.key_data(value)))
    array = np.asarray(value)
    return hashed(array.dtype, array.shape, array.tobytes().hex())


def program_digest(function: Callable[..., Any], *arguments: Any) -> str:
    """Return the digest of a function of arrays, traced for arguments of these shapes.

    >>> x = np.ones(3)
    >>> program_digest(lambda x: 2 * x + 1, x) == program_digest(lambda y: (1 + y * 2 * 1.0), x)
    True
    >>> program_digest(lambda x: 2 * x + 1, x) == program_digest(lambda x: 2 * x + 2, x)
    False
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return hashed(jax.tree.structure(shapes), *_outputs_of(closed))


def _outputs_of(closed: Any) -> list[str]:
    """Return the digests of a closed program's outputs, as functions of its inputs."""
    jaxpr = getattr(closed, "jaxpr", closed)
    inputs = [hashed("input", number, var.aval) for number, var in enumerate(jaxpr.invars)]
    return _evaluate(jaxpr, [*map(array_digest, getattr(closed, "consts", ()))], inputs)


def _evaluate(jaxpr: Any, consts: Sequence[str], inputs: Sequence[str]) -> list[str]:
    """Return the digests of a program's outputs, given those of its constants and inputs."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def of(atom: Any) -> str:
        return hashed("literal", array_digest(atom.val)) if isinstance(atom, core.Literal) else known[atom]

    for equation in jaxpr.eqns:
        operands = [*map(of, equation.invars)]
        known |= dict(zip(equation.outvars, _results(equation, operands), strict=True))
    return [*map(of, jaxpr.outvars)]


def _results(equation: Any, operands: list[str]) -> list[str]:
    """Return the digests of an operation's results."""
    name = equation.primitive.name
    inner = next((equation.params[key] for key in CALLS if key in equation.params), None)
    if name in CALLING and inner is not None:
        consts = [*map(array_digest, getattr(inner, "consts", ()))]
        return _evaluate(getattr(inner, "jaxpr", inner), consts, operands)
    if (same := _unchanged(equation)) is not None:
        return [operands[same]]
    operands = sorted(operands) if name in COMMUTATIVE else operands
    params = [(key, _parameter(value)) for key, value in sorted(equation.params.items()) if key not in IGNORED]
    kinds = [var.aval for var in equation.outvars]
    return [hashed(name, params, kinds, operands, number) for number in range(len(kinds))]


def _unchanged(equation: Any) -> int | None:
    """Return the number of the operand that an operation returns exactly as it is; None: it changes it."""
    name, (first, *others) = equation.primitive.name, equation.invars or [None]
    if first is None or len(equation.outvars) != 1:
        return None
    result = equation.outvars[0].aval
    if name == "mul" and _is_literal(first, 1) and _same(others[0].aval, result):
        return 1
    if name in NEUTRAL and _is_literal(others[0], NEUTRAL[name]) and _same(first.aval, result):
        return 0
    moves = {"convert_element_type", "reshape", "broadcast_in_dim", "copy", "copy_p"}
    return 0 if name in moves and not others and _same(first.aval, result) else None


def _is_literal(atom: Any, value: int) -> bool:
    """Return whether an operand is this number; 0 must not be -0.0."""
    return isinstance(atom, core.Literal) and np.ndim(atom.val) == 0 and str(float(atom.val)) == str(float(value))


def _same(aval: Any, result: Any) -> bool:
    return (aval.shape, aval.dtype, aval.weak_type) == (result.shape, result.dtype, result.weak_type)


def _parameter(value: Any) -> str:
    """Return the text of an operation's parameter, in which a program stands for its digest."""
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        return hashed(*_outputs_of(value))
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_parameter, value))})"
    if isinstance(value, Mapping):
        return _parameter(sorted(value.items()))
    return array_digest(value) if isinstance(value, np.ndarray | jax.Array) else repr(value)
