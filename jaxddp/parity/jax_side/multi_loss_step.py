"""A port's `flax_step` that mirrors a `torch_step`: a step of several losses, models or optimizers, watched.

A module of flax.nnx, or a dictionary of them, and its `nnx.Optimizer`s are changed in place, as torch's are:

    def flax_optimizer(model): return {"actor": nnx.Optimizer(model.actor, optax.adam(1e-3), wrt=nnx.Param), ...}
    def flax_step(model, optimizers, batch): ...; return {"actor": loss_of_actor, "critic": loss_of_critic}

For any other tree of arrays, the step returns the next state. Each transformation has the name of the branch that it
updates; a single one may update the full tree:

    flax_optimizer = {"actor": optax.adam(1e-3), "critic": optax.adam(1e-3)}
    def flax_step(optimizers, state, batch): ...; return next_state, {"actor": ..., "critic": ...}

Both average gradients with `jax.lax.pmean(gradients, "replica")`, and return each replica's losses.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import optax
from flax import nnx
from jax import numpy as jnp

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.collectives import AXIS_NAME
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError, differences, listed
from jaxddp.nn.any_model import AnyFunctional
from jaxddp.nn.functional import Functional
from jaxddp.nn.losses import Batch
from jaxddp.nn.model_tree import ModelTree, TreeMap
from jaxddp.nn.plain import PlainFunctional, PlainTree, is_inexact
from jaxddp.parity.jax_side.watched import Watched, fresh, watched
from jaxddp.parity.port.losses import named_losses
from jaxddp.state import Buffers, Params, TrainState, state_axes

Losses = dict[str, jax.Array]


class MultiLossStep(ABC):
    """A replica step that a port implements, with the interface of `jaxddp.step.replica_step.ReplicaStep`.

    In a run that the reference forces, the optimizers get the reference's gradients; see `forced`.

    Attributes:
        axes: axes of the state, which is the same on every replica.
    """

    axes: TrainState = state_axes(())

    def init(self, params: Params, buffers: Buffers) -> TrainState:
        """Return the state before the first step."""
        return TrainState(jnp.int32(0), params, buffers, self.init_optimizers(params, buffers))

    def start(self, params: Params, buffers: Buffers, replicas: Replicas) -> TrainState:
        """Place the state before the first step on all replicas."""
        return replicas.start(self.init(params, buffers), self.axes)

    def __call__(self, state: TrainState, batch: MicroBatches) -> tuple[TrainState, dict[str, Any], dict[str, Any]]:
        """Compute the next state and the stages: losses, the gradients that the optimizers got, the new values."""
        after, losses = self.take(state, batch.last)
        zeros = jax.tree.map(jnp.zeros_like, after.params)
        received = (tree.flat(one.received) for tree, one in self.each(after.opt_state))
        gradients = {name: x for of_one in received for name, x in of_one.items()}
        stages = {"local_loss": losses, "gradients": zeros | gradients, "params": after.params}
        return after, {}, stages | {"buffers": after.buffers}

    def forced(self, opt_state: Any, gradients: Params) -> Any:
        """Return the optimizers' states such that their next updates use these gradients."""

        def force(tree: TreeMap, state: Watched) -> Watched:
            names = tree.flat(state.given)
            given = tree.nest({name: gradients[name] for name in names})
            return state._replace(given=given, forced=jnp.asarray(True))

        return self.changed(opt_state, force)

    def shown(self, opt_state: Any) -> list[Any]:
        """Return the optimizers' states, with trees of arrays flattened to dictionaries by name.

        Raises:
            InputError: an optimizer made two updates in one step.
        """
        for tree, one in self.each(opt_state):
            if one.updates > 1:
                name = min(tree.flat(one.received))
                raise InputError(f"flax_step: updates {name} twice; must make one update with each optimizer")
        return [tree.flat_within(one.inner) for tree, one in self.each(opt_state)]

    @abstractmethod
    def init_optimizers(self, params: Params, buffers: Buffers) -> Any:
        """Return the optimizers' states before the first step."""

    @abstractmethod
    def take(self, state: TrainState, batch: Batch) -> tuple[TrainState, Losses]:
        """Take the step."""

    @abstractmethod
    def each(self, opt_state: Any) -> Iterator[tuple[TreeMap, Watched]]:
        """Yield each optimizer's state, and the map of the parameters that it updates."""

    @abstractmethod
    def changed(self, opt_state: Any, change: Callable[[TreeMap, Watched], Watched]) -> Any:
        """Apply `change` to each optimizer's state and return the states."""


def multi_loss_step(functional: AnyFunctional, step: Callable[..., Any], optimizers: Any) -> MultiLossStep:
    """Return the replica step of a port with a `torch_step`.

    Args:
        functional: pure side of the model.
        step, optimizers: the port's `flax_step` and `flax_optimizer`.

    Raises:
        InputError: the model and its optimizers have neither of the two forms.
    """
    if isinstance(functional, Functional):
        if not callable(optimizers):
            raise InputError("flax_optimizer: must be a function of the model that returns its nnx.Optimizers")
        return ModuleStep(functional, step, optimizers)
    if isinstance(functional, PlainFunctional):
        return PlainStep(functional, step, optimizers)
    raise InputError("flax_model: returns a linen module; must return its parameters if there is a torch_step")


def losses_alone(step: MultiLossStep, params: Params, buffers: Buffers, batch: Batch) -> Losses:
    """Return the losses of the first step on a single replica."""

    def take(_: jax.Array) -> Losses:
        losses: Losses = step(step.init(params, buffers), MicroBatches(None, batch))[2]["local_loss"]
        return losses

    return {name: loss[0] for name, loss in jax.vmap(take, axis_name=AXIS_NAME)(jnp.zeros(1)).items()}


class ModuleStep(MultiLossStep):
    """A step that changes an nnx module and its optimizers in place.

    Args:
        functional: pure side of the module.
        step: (module, optimizers, batch) -> losses.
        make: module -> its optimizers.
    """

    def __init__(self, functional: Functional, step: Callable[..., Any], make: Callable[[Any], Any]):
        self._functional, self._step, self._make = functional, step, make
        made, self._trees = self._made(functional.params, functional.buffers)
        if not self._trees:
            raise InputError(f"flax_optimizer: must return nnx.Optimizers, and returns {type(made).__name__}")
        self._graphdef = nnx.split(made)[0]

    def init_optimizers(self, params: Params, buffers: Buffers) -> Any:
        return nnx.state(self._made(params, buffers)[0])

    def take(self, state: TrainState, batch: Batch) -> tuple[TrainState, Losses]:
        module = self._functional.module(state.params, state.buffers)
        optimizers = nnx.merge(self._graphdef, self.changed(state.opt_state, lambda _, one: fresh(one)))
        losses = _scalars(self._step(module, optimizers, batch))
        params, buffers = self._functional.values(module)
        return TrainState(state.step + 1, params, buffers, nnx.state(optimizers)), losses

    def each(self, opt_state: Any) -> Iterator[tuple[TreeMap, Watched]]:
        nodes = dict(nnx.iter_graph(nnx.merge(self._graphdef, opt_state)))
        for path, tree in self._trees.items():
            yield tree, nnx.as_pure(nodes[path].opt_state)

    def changed(self, opt_state: Any, change: Callable[[TreeMap, Watched], Watched]) -> Any:
        optimizers = nnx.merge(self._graphdef, jax.tree.map(lambda x: x, opt_state))
        nodes = dict(nnx.iter_graph(optimizers))
        for path, tree in self._trees.items():
            new = change(tree, nnx.as_pure(nodes[path].opt_state))
            nnx.update(nodes[path].opt_state, nnx.state(new))
        return nnx.state(optimizers)

    def _made(self, params: Params, buffers: Buffers) -> tuple[Any, dict[Any, ModelTree]]:
        """Make the optimizers; return them, and for the path of each the map of its parameters."""
        module = self._functional.module(params, buffers)
        with _watching(module) as trees:
            made = self._make(module)
        nodes = nnx.iter_graph(made)
        return made, {path: trees[id(node)] for path, node in nodes if id(node) in trees}


@contextmanager
def _watching(module: nnx.Module) -> Iterator[dict[int, ModelTree]]:
    """Watch every nnx.Optimizer that is made; yield, by its id, the map of its parameters under their full names."""
    full = {id(x): ".".join(map(str, path)) for path, x in nnx.to_flat_state(nnx.state(module))}
    trees: dict[int, ModelTree] = {}
    init = nnx.Optimizer.__init__

    def watch(self: Any, model: Any, tx: optax.GradientTransformation, *args: Any, **kwargs: Any) -> None:
        init(self, model, watched(tx), *args, **kwargs)
        paths = nnx.to_flat_state(nnx.state(model))
        trees[id(self)] = ModelTree({full[id(x)]: path for path, x in paths if id(x) in full}, nnx.from_flat_state)

    with mock.patch.object(nnx.Optimizer, "__init__", watch):
        yield trees


class PlainStep(MultiLossStep):
    """A step that returns the next state of a tree of arrays.

    Args:
        functional: pure side of the tree.
        step: (optimizers, state, batch) -> (state, losses).
        optimizers: branch of the tree -> the transformation that updates it; or one for the full tree.
    """

    def __init__(self, functional: PlainFunctional, step: Callable[..., Any], optimizers: Any):
        self._functional, self._step = functional, step
        self._only = not isinstance(optimizers, Mapping)
        given: Mapping[str, Any] = {"": optimizers} if self._only else optimizers
        if kinds := [type(one).__name__ for one in given.values() if not hasattr(one, "update")]:
            says = "must be optax transformations by the branch of the model that they update"
            raise InputError(f"flax_optimizer: {says}, and has {kinds[0]}")
        self._optimizers = {key: watched(one) for key, one in given.items()}
        self._trees = {key: self._tree(key) for key in given}

    def init_optimizers(self, params: Params, buffers: Buffers) -> Any:
        states = {
            key: one.init(self._trees[key].nest({name: params[name] for name in self._trees[key].paths}))
            for key, one in self._optimizers.items()
        }
        return states[""] if self._only else states

    def take(self, state: TrainState, batch: Batch) -> tuple[TrainState, Losses]:
        tree = self._functional.param_tree
        opt_state = self.changed(state.opt_state, lambda _, one: fresh(one))
        optimizers = self._optimizers[""] if self._only else self._optimizers
        returned = self._step(optimizers, replace(state, params=tree.filled(state.params), opt_state=opt_state), batch)
        if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], TrainState)):
            raise InputError(f"flax_step: must return (state, losses), and returns {type(returned).__name__}")
        after, losses = returned
        params = tree.flat(after.params)
        if problems := differences(params, state.params):
            raise InputError(f"flax_step: must return all params of the state: {listed(problems)}")
        structures: list[Any] = [jax.tree.structure(x) for x in (opt_state, after.opt_state)]
        if structures[0] != structures[1]:
            raise InputError("flax_step: must return an opt_state like the one it is given")
        return TrainState(state.step + 1, params, state.buffers, after.opt_state), _scalars(losses)

    def each(self, opt_state: Any) -> Iterator[tuple[TreeMap, Watched]]:
        for key, tree in self._trees.items():
            yield tree, opt_state if self._only else opt_state[key]

    def changed(self, opt_state: Any, change: Callable[[TreeMap, Watched], Watched]) -> Any:
        if self._only:
            return change(self._trees[""], opt_state)
        return {key: change(tree, opt_state[key]) for key, tree in self._trees.items()}

    def _tree(self, key: str) -> PlainTree:
        """Return the map of a branch, under the full names of its arrays."""
        tree = self._functional.param_tree
        if self._only:
            return tree
        model = tree.filled(tree.values)
        branch = model.get(key) if isinstance(model, Mapping) else getattr(model, key, None)
        if branch is None:
            raise InputError(f"flax_optimizer: {key}: must be a branch of what flax_model returns")
        part = PlainTree.of(branch, is_inexact)
        return replace(part, paths={f"{key}.{name}": path for name, path in part.paths.items()})


def _scalars(returned: Any) -> Losses:
    losses = named_losses("flax_step", returned)
    return {name: jnp.asarray(value).reshape(()) for name, value in losses.items()}
