"""Map between the tree of a model's arrays, which optimizers see, and the flat dictionary that jaxddp keeps."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import optax
from flax import nnx, traverse_util

Path = tuple[Any, ...]
Flat = dict[str, Any]


@dataclass(frozen=True)
class TreeMap(ABC):
    """Map between flat dictionaries and trees of one kind.

    Attributes:
        paths: name in the flat dictionary -> path in the tree.
    """

    paths: Mapping[str, Any]

    @abstractmethod
    def nest(self, flat: Mapping[str, Any]) -> Any:
        """Return the tree of a dictionary, which may lack some of the names."""

    @abstractmethod
    def flat(self, tree: Any) -> Flat:
        """Return the dictionary of a tree, which may lack some of the paths, and have others, which are left out."""

    @abstractmethod
    def is_model_tree(self, node: Any) -> bool:
        """Return whether a node of an optimizer's state is such a tree."""

    def nest_within(self, state: Any) -> Any:
        """Nest every dictionary of arrays by name in an optimizer's state."""

        def is_flat(node: Any) -> bool:
            return isinstance(node, dict) and bool(node) and node.keys() <= self.paths.keys()

        return jax.tree.map(lambda node: self.nest(node) if is_flat(node) else node, state, is_leaf=is_flat)

    def flat_within(self, state: Any) -> Any:
        """Compute the inverse of `nest_within`; a node of a masked parameter stays as it is."""
        return jax.tree.map(
            lambda node: self.flat(node) if self.is_model_tree(node) else node, state, is_leaf=self.is_model_tree
        )


@dataclass(frozen=True)
class ModelTree(TreeMap):
    """Map between flat dictionaries and a model's tree.

    Attributes:
        paths: name in the flat dictionary ("layers.0.kernel") -> path in the tree ("layers", 0, "kernel").
        make: pairs of path and array -> tree.

    >>> tree = ModelTree({"fc1.bias": ("fc1", "bias"), "fc1.kernel": ("fc1", "kernel")})
    >>> tree.nest({"fc1.bias": 1, "fc1.kernel": 2})
    {'fc1': {'bias': 1, 'kernel': 2}}
    >>> tree.flat({"fc1": {"kernel": 3}})
    {'fc1.kernel': 3}
    """

    paths: Mapping[str, Path]
    make: Callable[[list[tuple[Path, Any]]], Any] = lambda items: traverse_util.unflatten_dict(dict(items))

    @classmethod
    def of_state(cls, state: nnx.State) -> "ModelTree":
        """Return the map of an nnx module's state: its tree is an `nnx.State`, as `nnx.Optimizer` hands it to optax."""
        return cls({".".join(map(str, path)): path for path, _ in nnx.to_flat_state(state)}, nnx.from_flat_state)

    @cached_property
    def names(self) -> dict[Path, str]:
        """Inverse of `paths`."""
        return {path: name for name, path in self.paths.items()}

    def nest(self, flat: Mapping[str, Any]) -> Any:
        """Return the tree of a dictionary, which may lack some of the names."""
        return self.make([(self.paths[name], value) for name, value in flat.items()])

    def flat(self, tree: Any) -> Flat:
        """Return the dictionary of a tree, which may lack some of the paths, and have others, which are left out."""
        items = dict(_leaves(tree))
        return {name: items[path] for name, path in self.paths.items() if path in items}

    def is_model_tree(self, node: Any) -> bool:
        """Return whether a node of an optimizer's state holds arrays of the model by their paths."""
        return isinstance(node, Mapping) and bool(node) and dict(_leaves(node)).keys() <= self.names.keys()


def seeing(tree: TreeMap, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return an optimizer of flat dictionaries that passes the model's tree to the given one.

    Masks, labels and rules by path then mean the same as without jaxddp. The state is kept flat. Slices of parameters
    (`jaxddp.step.zero`) have no tree and pass unchanged.

    >>> tree = ModelTree({"fc.bias": ("fc", "bias"), "fc.kernel": ("fc", "kernel")})
    >>> def kernels(params):
    ...     return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)
    >>> optimizer = seeing(tree, optax.add_decayed_weights(0.5, kernels))
    >>> params = {"fc.bias": 1.0, "fc.kernel": 2.0}
    >>> updates, _ = optimizer.update({"fc.bias": 0.0, "fc.kernel": 0.0}, optimizer.init(params), params)
    >>> updates
    {'fc.bias': 0.0, 'fc.kernel': 1.0}
    """

    def init(params: Any) -> Any:
        return (
            tree.flat_within(optimizer.init(tree.nest(params))) if isinstance(params, dict) else optimizer.init(params)
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if not isinstance(updates, dict):
            return optimizer.update(updates, state, params)
        given = None if params is None else tree.nest(params)
        nested, state = optimizer.update(tree.nest(updates), tree.nest_within(state), given)
        return tree.flat(nested), tree.flat_within(state)

    return optax.GradientTransformation(init, update)


def _leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the value of each leaf in a tree of mappings; the value of an nnx variable is its array."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*path, key))
    else:
        yield path, tree[...] if isinstance(tree, nnx.Variable) else tree
