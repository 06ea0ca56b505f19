"""Trees of arrays, in the form in which a checkpoint stores them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxddp.state import TrainState


def as_tree(state: TrainState) -> dict[str, Any]:
    """Return the fields of a state as a tree of NumPy arrays, without empty ones."""
    tree = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    for name in ("comm_state", "averaged", "scaler"):  # Orbax cannot store an empty tree
        if not jax.tree.leaves(tree[name]):
            del tree[name]
    return jax.tree.map(np.asarray, tree)


def not_finite(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Return the names of the arrays of a state that hold NaN, or an infinity where none may be.

    Buffers may hold infinities (a mask of -inf), and so may an optimizer's values that belong to no parameter (the
    best metric before a first test).

    >>> infinite = np.array([-np.inf])
    >>> not_finite({name: infinite for name in ("params.w", "buffers.mask", "opt_state.best", "opt_state.mu.w")})
    ['params.w', 'opt_state.mu.w']
    """
    of_params = tuple(name.removeprefix("params") for name in arrays if name.startswith("params."))

    def wrong(name: str, array: np.ndarray) -> bool:
        kept = name.startswith("buffers.") or (name.startswith("opt_state.") and not name.endswith(of_params))
        return bool(np.isnan(array).any()) or not kept

    floats = {name: array for name, array in arrays.items() if array.dtype.kind == "f"}
    return [name for name, array in floats.items() if not np.isfinite(array).all() and wrong(name, array)]


def without_values(tree: Any) -> Any:
    """Return a tree of NumPy arrays of the same shapes and dtypes, which take no memory."""
    return jax.tree.map(lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), tree)


def by_name(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their paths.

    >>> by_name({"params": {"layers": [1, 2]}})
    {'params.layers.0': 1, 'params.layers.1': 2}
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
