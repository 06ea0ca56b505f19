"""Names and layouts of arrays: flax keeps a layer's kernel as (*size, in, out), torch as weight (out, in, *size)."""

from typing import Any

KERNEL = "kernel"  # last part of a flax name
_TORCH_NAMES = {
    "kernel": "weight",
    "embedding": "weight",
    "scale": "weight",
    "mean": "running_mean",
    "var": "running_var",
}


def to_torch_layout(name: str, value: Any) -> Any:
    """Transpose a flax array, of NumPy or jax, to torch's layout; further leading axes are not allowed.

    >>> import numpy as np
    >>> to_torch_layout("conv.kernel", np.zeros((3, 3, 8, 16))).shape
    (16, 8, 3, 3)
    """
    if name.rpartition(".")[2] == KERNEL:
        *size, into, out = range(value.ndim)
        return value.transpose(out, into, *size)
    return value


def from_torch_layout(name: str, value: Any) -> Any:
    """Transpose a torch array to flax's layout, the inverse of `to_torch_layout`."""
    if name.rpartition(".")[2] == KERNEL:
        out, into, *size = range(value.ndim)
        return value.transpose(*size, into, out)
    return value


def torch_name(name: str) -> str:
    """Return the state_dict name of a flax parameter or buffer.

    >>> torch_name("stages.0.bn.mean")
    'stages.0.bn.running_mean'
    """
    path, _, leaf = name.rpartition(".")
    return f"{path}.{_TORCH_NAMES.get(leaf, leaf)}".lstrip(".")


def dotted(path: tuple[Any, ...]) -> str:
    """Return the name of a leaf: the attributes, keys and indices on the path to it.

    Haiku's module names are paths too: "mlp/~/linear_0" and "w" make "mlp.linear_0.w".

    >>> import jax
    >>> [dotted(path) for path, _ in jax.tree_util.tree_flatten_with_path({"a/~/b": [1, (2,)], "c/~_m/d": 3})[0]]
    ['a.b.0', 'a.b.1.0', 'c._m.d']
    """
    keys = [getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))) for key in path]
    words = [word.removeprefix("~") for key in keys for word in str(key).split("/")]
    return ".".join(filter(None, words))
