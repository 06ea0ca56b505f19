"""A port's `jax_step` that mirrors a `torch_step`, watched; see `jaxddp.step.program_step` for its two forms."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
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
from jaxddp.errors import InputError
from jaxddp.nn.any_model import AnyFunctional
from jaxddp.nn.functional import Functional
from jaxddp.nn.losses import Batch
from jaxddp.nn.model_tree import ModelTree, TreeMap
from jaxddp.nn.plain import PlainFunctional
from jaxddp.parity.jax_side.watched import Watched, fresh, watched
from jaxddp.state import Buffers, Params, TrainState
from jaxddp.step.program_step import Losses, ModuleStep, PlainStep, ProgramStep, keyed, step_of_form


class MultiLossStep(ProgramStep):
    """A port's step whose optimizers are watched.

    In a run that the reference forces, the optimizers get the reference's gradients; see `forced`.
    """

    def __call__(self, state: TrainState, batch: MicroBatches) -> tuple[TrainState, dict[str, Any], dict[str, Any]]:
        """Compute the next state and the stages: losses, the gradients that the optimizers got, the new values."""
        begun = replace(state, opt_state=self.changed(state.opt_state, lambda _, one: fresh(one)))
        after, losses = self.take(begun, batch.last)
        zeros = jax.tree.map(jnp.zeros_like, after.params)
        received = (tree.flat(one.received) for tree, one in self.each(after.opt_state))
        gradients = {name: x for of_one in received for name, x in of_one.items()}
        stages = {"local_loss": losses, "gradients": zeros | gradients, "params": after.params}
        return after, {}, stages | {"buffers": after.buffers}

    def forced(self, opt_state: Any, gradients: Params, flags: Params | None = None) -> Any:
        """Return the optimizers' states such that their next updates use these gradients.

        Args:
            opt_state: the states.
            gradients: the gradients.
            flags: 0 where an optimizer uses what it receives; None: nowhere.
        """

        def force(tree: TreeMap, state: Watched) -> Watched:
            names = tree.flat(state.given)
            given = tree.nest({name: gradients[name] for name in names})
            ones = tree.nest({name: jnp.ones_like(gradients[name]) if flags is None else flags[name] for name in names})
            return state._replace(given=given, forced=ones)

        return self.changed(opt_state, force)

    def shown(self, opt_state: Any) -> list[Any]:
        """Return the optimizers' states, with trees of arrays flattened to dictionaries by name.

        Raises:
            InputError: an optimizer made two updates in one step.
        """
        for tree, one in self.each(opt_state):
            if one.updates > 1:
                name = min(tree.flat(one.received))
                raise InputError(f"jax_step: updates {name} twice; must make one update with each optimizer")
        return [tree.flat_within(one.inner) for tree, one in self.each(opt_state)]

    @abstractmethod
    def each(self, opt_state: Any) -> Iterator[tuple[TreeMap, Watched]]:
        """Yield each optimizer's state, and the map of the parameters that it updates."""

    @property
    @abstractmethod
    def optimizers(self) -> Iterable[tuple[TreeMap, optax.GradientTransformation]]:
        """Each optimizer as the port makes it, and the map of the parameters that it updates."""

    @abstractmethod
    def changed(self, opt_state: Any, change: Callable[[TreeMap, Watched], Watched]) -> Any:
        """Apply `change` to each optimizer's state and return the states."""


def multi_loss_step(functional: AnyFunctional, step: Callable[..., Any], optimizers: Any) -> MultiLossStep:
    """Return the replica step of a port with a `torch_step`; see `jaxddp.step.program_step.program_step`."""
    made: MultiLossStep = step_of_form(functional, WatchedModuleStep, WatchedPlainStep, keyed(step, 0), optimizers)
    return made


def losses_alone(step: MultiLossStep, params: Params, buffers: Buffers, batch: Batch) -> Losses:
    """Return the losses of the first step on a single replica."""

    def take(_: jax.Array) -> Losses:
        losses: Losses = step(step.init(params, buffers), MicroBatches(None, batch))[2]["local_loss"]
        return losses

    return {name: loss[0] for name, loss in jax.vmap(take, axis_name=AXIS_NAME)(jnp.zeros(1)).items()}


class WatchedModuleStep(ModuleStep, MultiLossStep):
    """A step that changes an nnx module and its watched optimizers in place; see `ModuleStep`."""

    def __init__(self, functional: Functional, step: Callable[..., Any], make: Callable[[Any], Any]):
        self._trees: dict[Any, ModelTree] = {}
        self._given: dict[Any, optax.GradientTransformation] = {}
        super().__init__(functional, step, make)

    def made(self, params: Params, buffers: Buffers) -> Any:
        """Make the optimizers, and note for the path of each the map of its parameters."""
        module = self._functional.module(params, buffers)
        with _watching(module) as (trees, given):
            made = self._make(module)
        paths = {path: id(node) for path, node in nnx.iter_graph(made) if id(node) in trees}
        self._trees, self._given = ({path: of[node] for path, node in paths.items()} for of in (trees, given))
        return made

    @property
    def optimizers(self) -> Iterable[tuple[TreeMap, optax.GradientTransformation]]:
        return [(tree, self._given[path]) for path, tree in self._trees.items()]

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


@contextmanager
def _watching(module: nnx.Module) -> Iterator[tuple[dict[int, ModelTree], dict[int, optax.GradientTransformation]]]:
    """Watch every nnx.Optimizer that is made.

    Yield, by its id, the map of its parameters under their full names, and the transformation that it is given.
    """
    full = {id(x): ".".join(map(str, path)) for path, x in nnx.to_flat_state(nnx.state(module))}
    trees: dict[int, ModelTree] = {}
    given: dict[int, optax.GradientTransformation] = {}
    init = nnx.Optimizer.__init__

    def watch(self: Any, model: Any, tx: optax.GradientTransformation, *args: Any, **kwargs: Any) -> None:
        init(self, model, watched(tx), *args, **kwargs)
        paths = nnx.to_flat_state(nnx.state(model))
        given[id(self)] = tx
        trees[id(self)] = ModelTree({full[id(x)]: path for path, x in paths if id(x) in full}, nnx.from_flat_state)

    with mock.patch.object(nnx.Optimizer, "__init__", watch):
        yield trees, given


class WatchedPlainStep(PlainStep, MultiLossStep):
    """A step that returns the next state of a tree of arrays, with watched optimizers; see `PlainStep`."""

    def __init__(self, functional: PlainFunctional, step: Callable[..., Any], optimizers: Any):
        super().__init__(functional, step, optimizers)
        self._given = self._optimizers
        self._optimizers = {key: watched(one) for key, one in self._given.items()}

    @property
    def optimizers(self) -> Iterable[tuple[TreeMap, optax.GradientTransformation]]:
        return [(tree, self._given[key]) for key, tree in self._trees.items()]

    def each(self, opt_state: Any) -> Iterator[tuple[TreeMap, Watched]]:
        for key, tree in self._trees.items():
            yield tree, opt_state if self._only else opt_state[key]

    def changed(self, opt_state: Any, change: Callable[[TreeMap, Watched], Watched]) -> Any:
        if self._only:
            return change(self._trees[""], opt_state)
        return {key: change(tree, opt_state[key]) for key, tree in self._trees.items()}
