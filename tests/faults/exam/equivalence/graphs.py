"""Digest of a traced torch program, as `jaxprs` makes it of a JAX program."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from .jaxprs import array_digest, hashed

COMMUTATIVE = frozenset({"aten.add.Tensor", "aten.mul.Tensor", "aten.maximum.default", "aten.minimum.default"})


def graph_digest(function: Callable[..., Any], arguments: Sequence[Any], names: Mapping[int, str]) -> str:
    """Return the digest of a function of tensors, traced for these arguments.

    Args:
        function: the function; it may use tensors beside its arguments.
        arguments: tensors, or containers of tensors.
        names: id -> name of the tensors that it uses beside them; others count by their values.

    >>> x = torch.ones(3)
    >>> graph_digest(lambda x: 2 * x + x, [x], {}) == graph_digest(lambda x: x + x * 2, [x], {})
    True
    >>> graph_digest(lambda x: 2 * x + x, [x], {}) == graph_digest(lambda x: 3 * x + x, [x], {})
    False
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = make_fx(function)(*arguments)
    nodes = [*traced.graph.nodes]
    return _in_sequence(traced, nodes, names) if any(map(_mutates, nodes)) else _by_value(traced, nodes, names)


def _by_value(traced: Any, nodes: Sequence[Any], names: Mapping[int, str]) -> str:
    """Return the digest of the outputs; draws of random numbers count in their order."""
    known: dict[Any, str] = {}
    draws = 0
    for node in nodes:
        draws += _draws(node)
        known[node] = _node_digest(traced, node, known, names, draws if _draws(node) else 0)
    return hashed(known[nodes[-1]], draws)


def _in_sequence(traced: Any, nodes: Sequence[Any], names: Mapping[int, str]) -> str:
    """Return the digest of all operations in their order, for programs that change tensors in place."""
    known: dict[Any, str] = {}
    for number, node in enumerate(nodes):
        known[node] = _node_digest(traced, node, known, names, number)
    return hashed(*known.values())


def _node_digest(traced: Any, node: Any, known: Mapping[Any, str], names: Mapping[int, str], number: int) -> str:
    if node.op == "placeholder":
        return hashed("input", node.name, *map(str, _kind(node)))
    if node.op == "get_attr":
        tensor = getattr(traced, node.target)
        return hashed(names[id(tensor)]) if id(tensor) in names else tensor_digest(tensor)
    positional = (_of_rank(node, value, name) for value, name in zip(node.args, _names(node), strict=False))
    args, keywords = torch.fx.node.map_arg(([*positional], node.kwargs), lambda of: Digest(known[of]))
    if str(node.target) in COMMUTATIVE and not keywords:
        args = sorted(args, key=repr)
    return hashed(node.op, node.target, args, sorted(keywords.items()), number)


def _names(node: Any) -> list[str]:
    """Return the names of an operation's arguments."""
    schema = getattr(node.target, "_schema", None)
    return [""] * len(node.args) if schema is None else [argument.name for argument in schema.arguments]


def _of_rank(node: Any, value: Any, name: str) -> Any:
    """Return an argument; axes that count from the end as those that count from the start."""
    if not name.startswith("dim"):
        return value
    first = node.args[0][0] if isinstance(node.args[0], tuple | list) else node.args[0]
    rank = first.meta["val"].ndim + (str(node.target) in ("aten.unsqueeze.default", "aten.stack.default"))
    axes = [axis % rank if isinstance(axis, int) else axis for axis in (value if isinstance(value, list) else [value])]
    return axes if isinstance(value, list) else axes[0]


class Digest(str):
    """A digest, which stands in a node's arguments for the node that has it."""


def _kind(node: Any) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else ()


def _mutates(node: Any) -> bool:
    return node.op == "call_function" and bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def _draws(node: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the hash of a tensor's type, shape and bytes."""
    tensor = tensor.detach().cpu()
    kind = str(tensor.dtype)
    return hashed(kind, array_digest(tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()))
