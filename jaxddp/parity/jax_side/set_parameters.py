"""Parameters that a loss sets in a module of flax.nnx."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.extend.core import Jaxpr, Literal, Var


def parameters_of(model: Any) -> dict[str, Any]:
    """Return the arrays of the parameters of a flax.nnx module by name; {} for any other model."""
    if not isinstance(model, nnx.Module):
        return {}
    return {".".join(map(str, path)): x[...] for path, x in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def computed(function: Callable[[dict[str, Any]], Mapping[str, Any]], arrays: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the arrays that a function computes, other than those it passes through jit or checkpoint.

    Args:
        function: arrays by name -> some of them by name.
        arrays: what to trace it with.

    >>> @jax.checkpoint
    ... def changed(arrays): return {"a": arrays["a"], "b": jax.jit(jax.numpy.sin)(arrays["b"])}
    >>> computed(changed, {"a": 1.0, "b": 2.0})
    ('b',)
    """
    program, shapes = jax.make_jaxpr(function, return_shape=True)(dict(arrays))
    given = dict(zip(sorted(arrays), program.jaxpr.invars, strict=True))
    outputs = dict(zip(sorted(shapes), program.jaxpr.outvars, strict=True))
    return tuple(name for name, x in outputs.items() if _source(program.jaxpr, x) is not given[name])


def _source(jaxpr: Jaxpr, x: Var | Literal) -> Var | Literal:
    """Return the variable of a program that another one is, after calls that hand it on."""
    for equation in reversed(jaxpr.eqns):
        if x in equation.outvars:
            called = equation.params.get("jaxpr")
            inner = getattr(called, "jaxpr", called)
            if inner is None or len(inner.invars) != len(equation.invars):
                return x
            source = _source(inner, inner.outvars[equation.outvars.index(x)])
            places = [place for place, given in enumerate(inner.invars) if given is source]
            return _source(jaxpr, equation.invars[places[0]]) if places else x
    return x
