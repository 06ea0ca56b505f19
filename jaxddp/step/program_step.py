"""A step of the user's: several losses, models or optimizers, in place of jaxddp's loss, mean and update.

A module of flax.nnx, or a dictionary of them, and its `nnx.Optimizer`s are changed in place, as torch's are:

    def jax_optimizer(model): return {"actor": nnx.Optimizer(model.actor, optax.adam(1e-3), wrt=nnx.Param), ...}
    def jax_step(model, optimizers, batch): ...; return {"actor": loss_of_actor, "critic": loss_of_critic}

For any other tree of arrays, the step returns the next state. Each transformation has the name of the branch that it
updates; a single one may update the full tree:

    jax_optimizer = {"actor": optax.adam(1e-3), "critic": optax.adam(1e-3)}
    def jax_step(optimizers, state, batch): ...; return next_state, {"actor": ..., "critic": ...}

Both average gradients with `jax.lax.pmean(gradients, "replica")`, and return each replica's losses. A step that has a
parameter `key` gets a key, which differs between steps and between replicas.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
from flax import nnx
from jax import numpy as jnp

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.collectives import all_reduce, rank
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError, differences, listed
from jaxddp.nn.any_model import AnyFunctional
from jaxddp.nn.functional import Functional
from jaxddp.nn.losses import Batch, Sums
from jaxddp.nn.plain import PlainFunctional, PlainTree, is_inexact
from jaxddp.program import bound
from jaxddp.program.losses import named_losses
from jaxddp.state import Buffers, Params, TrainState, state_axes

Losses = dict[str, jax.Array]


class ProgramStep(ABC):
    """A replica step that a program implements, with the interface of `jaxddp.step.replica_step.ReplicaStep`.

    Attributes:
        axes: axes of the state, which is the same on every replica.
        frozen, ema_decay, shard_optimizer: as in `ReplicaStep`; the step itself freezes and averages.
    """

    axes: TrainState = state_axes(())
    frozen: tuple[str, ...] = ()
    ema_decay: float | None = None
    shard_optimizer: bool = False

    def init(self, params: Params, buffers: Buffers) -> TrainState:
        """Return the state before the first step."""
        return TrainState(jnp.int32(0), params, buffers, self.init_optimizers(params, buffers))

    def start(self, params: Params, buffers: Buffers, replicas: Replicas) -> TrainState:
        """Place the state before the first step on all replicas."""
        return replicas.start(self.init(params, buffers), self.axes)

    def place(self, state: TrainState, replicas: Replicas) -> TrainState:
        """Place a state on the devices of all replicas."""
        return replicas.place(state, self.axes)

    def unsharded(self, state: TrainState) -> TrainState:
        """Return the state, which has no slices."""
        return state

    def __call__(self, state: TrainState, batch: MicroBatches) -> tuple[TrainState, Sums, dict[str, Any]]:
        """Compute the next state, and the losses as sums over the replicas; "loss" is the sum of several."""
        after, losses = self.take(state, batch.last)
        if "loss" not in losses:
            losses = {"loss": jnp.stack([*losses.values()]).sum(), **losses}
        sums = {"count": jnp.ones_like(losses["loss"]), **losses}
        return after, dict(zip(sums, all_reduce(jnp.stack([*sums.values()])), strict=True)), {}

    @abstractmethod
    def init_optimizers(self, params: Params, buffers: Buffers) -> Any:
        """Return the optimizers' states before the first step."""

    @abstractmethod
    def take(self, state: TrainState, batch: Batch) -> tuple[TrainState, Losses]:
        """Take the step."""


def program_step(functional: AnyFunctional, step: Callable[..., Any], optimizers: Any, seed: int = 0) -> ProgramStep:
    """Return the replica step of a program with a `jax_step`.

    Args:
        functional: pure side of the model.
        step, optimizers: the program's `jax_step` and `jax_optimizer`.
        seed: seed of the keys that the step may take.

    Raises:
        InputError: the model and its optimizers have neither of the two forms.
    """
    return step_of_form(functional, ModuleStep, PlainStep, keyed(step, seed), optimizers)


def step_of_form(functional: AnyFunctional, of_module: Any, of_tree: Any, step: Any, optimizers: Any) -> Any:
    """Return the step of a module's form, or of a tree's."""
    if isinstance(functional, Functional):
        if not callable(optimizers):
            raise InputError("jax_optimizer: must be a function of the model that returns its nnx.Optimizers")
        return of_module(functional, step, optimizers)
    if isinstance(functional, PlainFunctional):
        return of_tree(functional, step, optimizers)
    raise InputError("jax_model: returns a linen module; must return its parameters if there is a jax_step")


def keyed(step: Callable[..., Any], seed: int) -> Callable[..., Any]:
    """Return the step as a function of the number of steps before, too, on which its key depends."""

    def at(number: jax.Array, *arguments: Any) -> Any:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), rank())
        return bound(step, key=key)(*arguments)

    return at


class ModuleStep(ProgramStep):
    """A step that changes an nnx module and its optimizers in place.

    Args:
        functional: pure side of the module.
        step: (number of steps before, module, optimizers, batch) -> losses.
        make: module -> its optimizers.
    """

    def __init__(self, functional: Functional, step: Callable[..., Any], make: Callable[[Any], Any]):
        self._functional, self._step, self._make = functional, step, make
        made = self.made(functional.params, functional.buffers)
        if not any(isinstance(node, nnx.Optimizer) for _, node in nnx.iter_graph(made)):
            raise InputError(f"jax_optimizer: must return nnx.Optimizers, and returns {type(made).__name__}")
        self._graphdef = nnx.split(made)[0]

    def init_optimizers(self, params: Params, buffers: Buffers) -> Any:
        return nnx.state(self.made(params, buffers))

    def made(self, params: Params, buffers: Buffers) -> Any:
        """Make the optimizers of a module with these values."""
        return self._make(self._functional.module(params, buffers))

    def take(self, state: TrainState, batch: Batch) -> tuple[TrainState, Losses]:
        module = self._functional.module(state.params, state.buffers)
        optimizers = nnx.merge(self._graphdef, _copied(state.opt_state))
        losses = scalars(self._step(state.step, module, optimizers, batch))
        params, buffers = self._functional.values(module)
        return TrainState(state.step + 1, params, buffers, nnx.state(optimizers)), losses


class PlainStep(ProgramStep):
    """A step that returns the next state of a tree of arrays.

    Args:
        functional: pure side of the tree.
        step: (number of steps before, optimizers, state, batch) -> (state, losses).
        optimizers: branch of the tree -> the transformation that updates it; or one for the full tree.
    """

    def __init__(self, functional: PlainFunctional, step: Callable[..., Any], optimizers: Any):
        self._functional, self._step = functional, step
        self._only = not isinstance(optimizers, Mapping)
        given: Mapping[str, Any] = {"": optimizers} if self._only else optimizers
        if kinds := [type(one).__name__ for one in given.values() if not hasattr(one, "update")]:
            says = "must be optax transformations by the branch of the model that they update"
            raise InputError(f"jax_optimizer: {says}, and has {kinds[0]}")
        self._optimizers = dict(given)
        self._trees = {key: self._tree(key) for key in given}

    def init_optimizers(self, params: Params, buffers: Buffers) -> Any:
        states = {
            key: one.init(self._trees[key].nest({name: params[name] for name in self._trees[key].paths}))
            for key, one in self._optimizers.items()
        }
        return states[""] if self._only else states

    def take(self, state: TrainState, batch: Batch) -> tuple[TrainState, Losses]:
        tree, opt_state = self._functional.param_tree, state.opt_state
        optimizers = self._optimizers[""] if self._only else self._optimizers
        nested = replace(state, params=tree.filled(state.params))
        returned = self._step(state.step, optimizers, nested, batch)
        if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], TrainState)):
            raise InputError(f"jax_step: must return (state, losses), and returns {type(returned).__name__}")
        after, losses = returned
        params = tree.flat(after.params)
        if problems := differences(params, state.params):
            raise InputError(f"jax_step: must return all params of the state: {listed(problems)}")
        structures: list[Any] = [jax.tree.structure(x) for x in (opt_state, after.opt_state)]
        if structures[0] != structures[1]:
            raise InputError("jax_step: must return an opt_state like the one it is given")
        return TrainState(state.step + 1, params, state.buffers, after.opt_state), scalars(losses)

    def _tree(self, key: str) -> PlainTree:
        """Return the map of a branch, under the full names of its arrays."""
        tree = self._functional.param_tree
        if self._only:
            return tree
        model = tree.filled(tree.values)
        branch = model.get(key) if isinstance(model, Mapping) else getattr(model, key, None)
        if branch is None:
            raise InputError(f"jax_optimizer: {key}: must be a branch of what jax_model returns")
        part = PlainTree.of(branch, is_inexact)
        return replace(part, paths={f"{key}.{name}": path for name, path in part.paths.items()})


def scalars(returned: Any) -> Losses:
    """Return the losses of a step by name, as scalars."""
    losses = named_losses("jax_step", returned)
    return {name: jnp.asarray(value).reshape(()) for name, value in losses.items()}


def _copied(state: Any) -> Any:
    """Return the state with new variables, because nnx refuses those of an outer trace."""
    return jax.tree.map(lambda x: x, state)
