"""torch.optim's Adafactor and Muon, which treat a matrix as a unit.

Both look at a tensor's rows and columns in torch's layout: leaves that are called "kernel" are transposed to it (see
`jaxddp.torch_layout`), all others are taken as they are. A sharded optimizer cannot use them, since its slices are
not matrices. The notation and the rules are those of `jaxddp.optim.optimizers`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxddp.errors import InputError, check_name
from jaxddp.optim.transforms import at, directed, ranges_checked
from jaxddp.torch_layout import from_torch_layout, to_torch_layout

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of Muon's quintic iteration
ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


class AdafactorState(NamedTuple):
    """Number of steps taken, and by leaf the mean squares of rows and columns, or of each element of a vector."""

    steps: jax.Array
    variances: Any


class _OfLeaf(NamedTuple):
    """Update of a parameter, and what the optimizer keeps of it."""

    update: jax.Array
    kept: Any


class MuonState(NamedTuple):
    """Number of steps taken, and running means of the gradients."""

    steps: jax.Array
    momentum: optax.Updates


@ranges_checked
def adafactor(
    lr: optax.ScalarOrSchedule = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> optax.GradientTransformation:
    """Adafactor: Adam's mean squares from those of rows and columns, and steps in units of the parameter.

        R <- R + t^beta2_decay (mean of g^2 over a row - R);  C likewise over a column
        v = R C / max(mean of R, eps1);  of a vector v <- v + t^beta2_decay (g^2 - v)
        u = g / sqrt(max(v, eps1^2))
        p <- (1 - lr weight_decay) p - min(lr, 1 / sqrt(t)) max(eps2, rms(p)) u / max(1, rms(u) / d)

    A tensor of more than two axes is a stack of matrices of its last two.

    Args:
        beta2_decay: power by which the share of a new gradient falls.
        eps: eps1, None for the machine epsilon of the parameter's dtype, and eps2.
        d: largest root mean square of an update before the rate, at least 1.
        weight_decay: decoupled weight decay.
        maximize: go uphill.

    Raises:
        InputError: `d` is below 1.

    Source: torch.optim.Adafactor; Shazeer and Stern, https://arxiv.org/abs/1804.04235.

    >>> optimizer, params = adafactor(lr=0.5), {"w": jnp.ones((2, 2))}
    >>> updates, state = optimizer.update({"w": jnp.array([[3.0, 1.0], [1.0, 3.0]])}, optimizer.init(params), params)
    >>> print(updates["w"].round(3))
    [[-0.671 -0.224]
     [-0.224 -0.671]]
    """
    if d < 1:
        raise InputError(f"d {d}: must be at least 1")

    def init(params: optax.Params) -> AdafactorState:
        return AdafactorState(jnp.zeros([], jnp.int32), _by_leaf(_no_variances, params))

    def update(grads: optax.Updates, state: AdafactorState, params: Any = None) -> tuple[optax.Updates, AdafactorState]:
        steps, rate = optax.safe_increment(state.steps), at(lr, state.steps)
        t = steps.astype(float)
        share, capped = t**beta2_decay, jnp.minimum(rate, 1 / jnp.sqrt(t))

        def of_leaf(name: str, g: jax.Array, p: jax.Array, before: tuple[jax.Array, ...]) -> _OfLeaf:
            g, p = to_torch_layout(name, g), to_torch_layout(name, p)
            eps1 = jnp.finfo(p.dtype).eps if eps[0] is None else eps[0]
            means = (jnp.mean(g**2, -1, keepdims=True), jnp.mean(g**2, -2, keepdims=True)) if g.ndim > 1 else (g**2,)
            after = tuple((old + share * (new - old)).astype(old.dtype) for old, new in zip(before, means, strict=True))
            v = after[0]
            if g.ndim > 1:
                v = after[0] * after[1] / jnp.maximum(jnp.mean(after[0], -2, keepdims=True), eps1)
            u = g / jnp.sqrt(jnp.maximum(v, eps1**2))
            step = capped * jnp.maximum(eps[1], _rms(p)) / jnp.maximum(1.0, _rms(u) / d) * u
            return _OfLeaf(from_torch_layout(name, (-step - rate * weight_decay * p).astype(g.dtype)), after)

        return _unzipped(_by_leaf(of_leaf, grads, params, state.variances), steps, AdafactorState)

    return directed(maximize, optax.GradientTransformation(init, update))


@ranges_checked
def muon(
    lr: optax.ScalarOrSchedule = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
) -> optax.GradientTransformation:
    """Muon: momentum whose matrix is replaced by a nearly orthogonal one, computed in bfloat16.

        B <- B + (1 - momentum) (g - B)
        O = newton_schulz(g + momentum (B - g));  without nesterov of B
        p <- (1 - lr weight_decay) p - lr adjust(rows, columns) O

    It takes matrices only; use `optax.partition` to give the other parameters another optimizer, as with torch's.

    Args:
        weight_decay: decoupled weight decay.
        momentum: decay of the running mean `B`.
        nesterov: look ahead by one momentum step.
        ns_coefficients, ns_steps: a, b, c and number of the steps X <- a X + (b X X^T + c (X X^T)^2) X.
        eps: smallest norm by which the matrix is divided first.
        adjust_lr_fn: "original" or None, sqrt(max(1, rows / columns)), or "match_rms_adamw", 0.2 sqrt(max(rows,
            columns)), of torch's weight (out, in).

    Raises:
        InputError: an unknown `adjust_lr_fn`, or at the first use, a parameter that is not a matrix.

    Source: torch.optim.Muon; Jordan, https://kellerjordan.github.io/posts/muon/.

    >>> optimizer, params = muon(lr=0.5, weight_decay=0.0), {"w": jnp.zeros((2, 2))}
    >>> updates, _ = optimizer.update({"w": jnp.array([[3.0, 0.0], [0.0, 3.0]])}, optimizer.init(params), params)
    >>> bool((abs(updates["w"] + 0.5 * jnp.eye(2)) < 0.2).all())
    True
    """
    adjust = adjust_lr_fn or "original"
    check_name("adjust_lr_fn", adjust, tuple(ADJUSTMENTS))

    def init(params: optax.Params) -> MuonState:
        _by_leaf(_check_matrix, params)
        return MuonState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params))

    def update(grads: optax.Updates, state: MuonState, params: Any = None) -> tuple[optax.Updates, MuonState]:
        rate = at(lr, state.steps)

        def of_leaf(name: str, g: jax.Array, p: jax.Array, before: jax.Array) -> _OfLeaf:
            mean = before + (1 - momentum) * (g - before)
            matrix = to_torch_layout(name, g + momentum * (mean - g) if nesterov else mean)
            orthogonal = newton_schulz(matrix, ns_coefficients, ns_steps, eps).astype(g.dtype)
            moved = from_torch_layout(name, ADJUSTMENTS[adjust](*matrix.shape) * orthogonal)
            return _OfLeaf((-rate * (moved + weight_decay * p)).astype(g.dtype), mean.astype(before.dtype))

        after = _by_leaf(of_leaf, grads, params, state.momentum)
        return _unzipped(after, optax.safe_increment(state.steps), MuonState)

    return optax.GradientTransformation(init, update)


def newton_schulz(matrix: jax.Array, coefficients: tuple[float, float, float], steps: int, eps: float) -> jax.Array:
    """Return a matrix with the singular vectors of the given one and singular values near 1, rounded to bfloat16.

    Each product is summed in float32 and rounded to bfloat16 with what is added to it, as by torch's `addmm`.
    """
    a, b, c = coefficients

    def rounded(x: jax.Array) -> jax.Array:
        """Round to bfloat16, in float32; XLA drops a cast that is followed by the opposite one."""
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)

    def product(one: jax.Array, other: jax.Array) -> jax.Array:
        one, other = one.astype(jnp.bfloat16), other.astype(jnp.bfloat16)  # exact, and fast on GPUs
        return jnp.matmul(one, other, preferred_element_type=jnp.float32)

    x = rounded(matrix.astype(jnp.float32))
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x = rounded(x / jnp.maximum(rounded(jnp.linalg.norm(x)), rounded(jnp.float32(eps))))
    for _ in range(steps):
        gram = rounded(product(x, x.T))
        x = rounded(a * x + product(rounded(b * gram + c * product(gram, gram)), x))
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def _no_variances(name: str, p: jax.Array) -> tuple[jax.Array, ...]:
    p = to_torch_layout(name, p)
    return (jnp.zeros_like(p[..., :1]), jnp.zeros_like(p[..., :1, :])) if p.ndim > 1 else (jnp.zeros_like(p),)


def _check_matrix(name: str, p: jax.Array) -> None:
    if p.ndim != 2:
        raise InputError(f"muon: {name or 'the parameter'} has shape {p.shape}; must be a matrix (optax.partition)")


def _rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(x**2))


def _by_leaf(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Map a function of (last part of the leaf's path, leaf, leaves of the other trees) over a tree."""

    def named(path: tuple[Any, ...], *leaves: Any) -> Any:
        words = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        words = [word for word in words if word not in ("", "value", "raw_value")]  # the last are nnx's own
        return function(words[-1] if words else "", *leaves)

    return jax.tree_util.tree_map_with_path(named, tree, *others)


def _unzipped(both: Any, steps: jax.Array, state: Callable[..., Any]) -> tuple[optax.Updates, Any]:
    """Split a tree of `_OfLeaf` into the updates and the optimizer's state."""

    def is_leaf(node: Any) -> bool:
        return isinstance(node, _OfLeaf)

    updates = jax.tree.map(lambda of_leaf: of_leaf.update, both, is_leaf=is_leaf)
    return updates, state(steps, jax.tree.map(lambda of_leaf: of_leaf.kept, both, is_leaf=is_leaf))
