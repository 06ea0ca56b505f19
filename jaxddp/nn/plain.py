"""A tree of arrays and a function of it, as in Haiku and Equinox; the counterpart of `jaxddp.nn.functional`.

Any pytree works: names come from its paths, so that none of these libraries is needed.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax
from jax import numpy as jnp
from jax.tree_util import keystr

from jaxddp.errors import InputError, complex_error
from jaxddp.nn.functional import LocalLoss, abstract
from jaxddp.nn.losses import Batch, Metrics, Sums, as_losses, no_metrics, sums_of
from jaxddp.nn.model_tree import Flat, TreeMap
from jaxddp.nn.placed import placed
from jaxddp.program import takes
from jaxddp.state import Buffers, Params
from jaxddp.torch_layout import dotted

Loss = Callable[..., Any]


@dataclass(frozen=True)
class PlainTree(TreeMap):
    """Map between flat dictionaries and trees of one structure.

    Attributes:
        paths: name in the flat dictionary -> path in the tree, as `jax.tree_util.keystr` writes it.
        leaves: all leaves of the tree, by their paths; those without a name are put back as they are.
        structure: structure of the tree.

    >>> tree = PlainTree.of({"net/~/fc": {"w": np.ones(2), "steps": 7}}, is_inexact)
    >>> tree.paths
    {'net.fc.w': "['net/~/fc']['w']"}
    >>> tree.filled({"net.fc.w": 3.0}), tree.nest({"net.fc.w": 3.0})
    ({'net/~/fc': {'steps': 7, 'w': 3.0}}, {'net/~/fc': {'steps': None, 'w': 3.0}})
    """

    paths: Mapping[str, str]
    leaves: Mapping[str, Any]
    structure: Any

    @classmethod
    def of(cls, tree: Any, named: Callable[[Any], bool], left_out: Collection[str] = ()) -> "PlainTree":
        """Return the map of a tree.

        Args:
            tree: any pytree.
            named: selects the leaves of the flat dictionary.
            left_out: names of further leaves that are not in it.

        Raises:
            InputError: two leaves have the same name.
        """
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        of_named = [(dotted(path), keystr(path)) for path, leaf in leaves if named(leaf)]
        paths = {name: path for name, path in of_named if name not in left_out}
        for name, path in of_named:
            if paths.get(name, path) != path:
                raise InputError(f"jax_model: both {path} and {paths[name]} would be called {name}; rename one")
        return cls(paths, {keystr(path): leaf for path, leaf in leaves}, structure)

    @property
    def values(self) -> Flat:
        """Values of the flat dictionary."""
        return {name: self.leaves[path] for name, path in self.paths.items()}

    def nest(self, flat: Mapping[str, Any]) -> Any:
        """Return the tree that optimizers see: None in place of leaves that have no name, or are not in `flat`."""
        return self._filled(dict.fromkeys(self.leaves), flat)

    def filled(self, flat: Mapping[str, Any]) -> Any:
        """Return the tree with these values, and all other leaves as they were."""
        return self._filled(self.leaves, flat)

    def flat(self, tree: Any) -> Flat:
        """Return the dictionary of a tree, which may lack some of the paths, and have others, which are left out."""
        items = {keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree, _is_masked)[0]}
        return {name: items[path] for name, path in self.paths.items() if path in items}

    def is_model_tree(self, node: Any) -> bool:
        """Return whether a node of an optimizer's state has the tree's structure."""
        return bool(jax.tree.structure(node, _is_masked) == self._structure_of_nested)

    @cached_property
    def _structure_of_nested(self) -> Any:
        return jax.tree.structure(self.nest(dict.fromkeys(self.paths, 0)))

    def _filled(self, leaves: Mapping[str, Any], flat: Mapping[str, Any]) -> Any:
        given = {self.paths[name]: value for name, value in flat.items()}
        return jax.tree.unflatten(self.structure, ({**leaves, **given}).values())


class PlainFunctional:
    """Pure side of a tree of arrays and a loss that is a function of it.

    The parameters are the tree's arrays of real numbers. All other leaves (integers, functions, None) are put back as
    they are when the loss is computed, as by Equinox's `partition`. A loss of three arguments, (params, state, batch),
    carries a state, as with Haiku's `transform_with_state`: the model is the pair (params, state), the arrays of the
    state are buffers, and the loss returns a pair, whose second item is the new state.

    Args:
        model: any pytree; with a state, a pair of them.
        loss_fn: (model, batch) -> loss, or (params, state, batch) -> (loss, state).
        constants: names of arrays that are neither parameters nor buffers.

    Attributes:
        params, buffers: its values by name.
        shapes: shapes of the arrays that may have a twin in torch; a state's counters and flags have none.
        param_tree, buffer_tree: maps to the trees.

    Raises:
        InputError: the model has no parameters, complex ones, or several of the same name.

    >>> functional = PlainFunctional({"fc": {"w": np.ones((3, 2)), "scale": 2}}, lambda model, batch: 0.0)
    >>> {name: value.shape for name, value in functional.params.items()}
    {'fc.w': (3, 2)}
    """

    def __init__(self, model: Any, loss_fn: Loss, constants: Collection[str] = ()):
        self._carries = carries_state(loss_fn)
        if self._carries and not (isinstance(model, tuple) and len(model) == 2):
            kind = type(model).__name__
            raise InputError(f"jax_model: must return (params, state), as jax_loss takes a state, and returns {kind}")
        tree, state = model if self._carries else (model, ())
        leaves = [leaf for part in (tree, state) for leaf in jax.tree_util.tree_flatten_with_path(part)[0]]
        named = {dotted(path): leaf for path, leaf in leaves if _is_array(leaf)}
        self.shapes = {name: x.shape for name, x in named.items() if is_inexact(x) or name in constants}
        self.param_tree = PlainTree.of(tree, is_inexact, constants)
        self.buffer_tree = PlainTree.of(state, _is_array)
        self.params = {name: jnp.asarray(value) for name, value in self.param_tree.values.items()}
        self.buffers = {name: jnp.asarray(value) for name, value in self.buffer_tree.values.items()}
        if not self.params:
            raise InputError(
                "jax_model: must return a flax.nnx or flax.linen module, or a tree of arrays (Haiku's parameters, an "
                f"Equinox module), not {_kind(model)}"
            )
        if both := sorted(self.params.keys() & self.buffers.keys()):
            raise InputError(f"jax_model: both a parameter and the state have an array {both[0]}; rename one")
        for name, value in {**self.params, **self.buffers}.items():
            if jnp.issubdtype(value.dtype, jnp.complexfloating):
                raise complex_error("jax_model", name, value.dtype)

    def gradient_order(self) -> tuple[str, ...]:
        """Return the parameters' names, the last first, as an order of torch's backward pass."""
        return tuple(reversed(self.params))

    def forget_values(self) -> None:
        """Free the parameters' values; keep their names, shapes and dtypes."""
        self.params = abstract(self.params)
        named = dict.fromkeys(self.param_tree.paths.values())
        self.param_tree = replace(self.param_tree, leaves={**self.param_tree.leaves, **named})

    def arguments(self, params: Params, buffers: Buffers) -> tuple[Any, ...]:
        """Return the loss function's arguments before the batch: the tree, and the state if it carries one."""
        tree = self.param_tree.filled(params)
        return (tree, self.buffer_tree.filled(buffers)) if self._carries else (tree,)

    def local_loss(
        self,
        loss_fn: Loss,
        train: bool | None = None,
        masks: str = "replica",
        amp: str = "none",
        metrics: Metrics = no_metrics,
        seed: int = 0,
    ) -> LocalLoss:
        """Turn the loss function into a pure function (params, buffers, batch) -> (sums, new buffers).

        Args:
            loss_fn: see the class; it may take `train` and `key`, see `jaxddp.nn.placed`.
            train, masks, amp, metrics: see `Functional.local_loss`.
            seed: seed of the keys.
        """

        def function(loss_fn: Loss, params: Params, buffers: Buffers, batch: Batch) -> tuple[Sums, Buffers]:
            arguments = self.arguments(params, buffers)
            returned = loss_fn(*arguments, batch)
            if self._carries:
                returned, buffers = self._loss_and_state(returned)
            losses, valid = as_losses(returned, "jax_loss"), None if train is None else batch.get("valid")
            return sums_of(losses, valid, train, metrics(*arguments, batch), batch), buffers

        return placed(function, loss_fn, train, masks, amp, seed)

    def _loss_and_state(self, returned: Any) -> tuple[Any, Buffers]:
        if not (isinstance(returned, tuple) and len(returned) == 2):
            raise InputError(f"jax_loss: must return (loss, state), and returns {type(returned).__name__}")
        loss, state = returned
        after = self.buffer_tree.flat(state)
        if missing := sorted(self.buffers.keys() - after.keys()):
            raise InputError(f"jax_loss: must return (loss, state) with all of the state; lacks {', '.join(missing)}")
        return loss, {name: jnp.asarray(value, self.buffers[name].dtype) for name, value in after.items()}


def _kind(model: Any) -> str:
    """Describe an object that was returned in place of a model, with advice if it is almost one."""
    if isinstance(model, type):
        return f"the class {model.__name__} itself"
    package = type(model).__module__.partition(".")[0]
    kind = f"{package}.{type(model).__name__}".removeprefix("builtins.")
    return f"{kind}; return what its init returns" if hasattr(model, "init") else kind


def carries_state(loss_fn: Loss) -> bool:
    """Return whether a loss function takes (params, state, batch).

    >>> carries_state(lambda params, state, batch: 0.0), carries_state(lambda model, batch, train=True: 0.0)
    (True, False)
    """
    return takes(loss_fn) == 3


def is_inexact(leaf: Any) -> bool:
    """Return whether a leaf is an array of real or complex numbers."""
    return _is_array(leaf) and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
