"""Takes a translation's steps on virtual replicas, to see at which stage a planted fault shows first.

Every step starts from where the right translation was; the optimizer alone keeps its state. Nothing is
compiled as a whole: one step of each of hundreds of ports is faster operation by operation.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import torch
from jax import numpy as jnp

from jaxddp.collectives import AXIS_NAME
from jaxddp.functional import Functional, LocalLoss, cast
from jaxddp.losses import Losses
from jaxddp.parity.convert import Converter
from jaxddp.parity.port import Port
from jaxddp.state import TrainState

from .scenarios import Scenario, Translation
from .steps import Step, over_all_elements

Stages = dict[str, Any]  # stage -> tensors, each with a leading axis for the replica

ORDER = ("local_loss", "local_gradients", "gradients", "clipped_gradients", "update", "buffers")
SIDES = ("torch", "flax")
FLOOR = 1e-11  # what is above it differs; measured: TBD


@dataclasses.dataclass
class Reference:
    """The right translation's run.

    Attributes:
        states: parameters and buffers before each step.
        stages: of each step.
    """

    scenario: Scenario
    states: list[TrainState]
    stages: list[Stages]


def local_loss(port: Port, functional: Functional) -> LocalLoss:
    """The port's flax loss as sums, whatever it returns."""

    def losses(model: Any, batch: Any) -> Losses:
        found = port.flax_loss(model, batch)
        values, weights = found if isinstance(found, tuple) else (found, None)
        return Losses(jnp.atleast_1d(values), weights)

    return functional.local_loss(losses, train=True)


def start(port: Port, seed: int) -> tuple[Functional, Any, Any]:
    """A model, and the values that torch's starts from."""
    functional = Functional(port.flax_model())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = port.torch_model().double()
    shapes = {name: value.shape for name, value in {**functional.params, **functional.buffers}.items()}
    tensors = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    arrays = Converter(module, shapes).to_flax(tensors)
    params, buffers = ({name: arrays[name] for name in kind} for kind in (functional.params, functional.buffers))
    return functional, cast(params, jnp.float64), cast(buffers, jnp.float64)


def stacked(port: Port, world_size: int, step: int) -> Any:
    """The batches of all replicas, leaves (W, A, B, ...)."""
    of_ranks = [port.micro_batches(step, rank, "flax") for rank in range(world_size)]
    return {
        name: np.stack([np.stack([micro[name] for micro in micros]) for micros in of_ranks]) for name in of_ranks[0][0]
    }


def replica_step(port: Port, functional: Functional) -> Any:
    """(state, batch) -> (state, stages): the port's own, or one that does as jaxddp's."""
    loss = local_loss(port, functional)

    def mean(params: Any, buffers: Any, batch: Any) -> Any:
        sums, new_buffers = loss(params, buffers, batch)
        return sums["loss"] / sums["count"], new_buffers

    def step(state: TrainState, batch: Any) -> Any:
        batch = batch if port.accumulation_steps > 1 else {name: array[0] for name, array in batch.items()}
        own = port.flax_step or Step(port.accumulation_steps, port.clip_grad_norm)
        if port.flax_step is None and port.loss_normalization == "global":
            count = lambda part: loss(state.params, state.buffers, part)[0]["count"]  # noqa: E731
            own = dataclasses.replace(own, count=count, combine=over_all_elements)
        return own(mean, port.flax_optimizer, state, batch)

    return step


def take(port: Port, functional: Functional, state: TrainState, batch: Any, world_size: int) -> tuple[Any, Stages]:
    """One step from one state: the next one's parts and the stages, with the replicas as leading axis."""

    def step(batch: Any) -> Any:
        new, stages = replica_step(port, functional)(state, batch)
        return new, stages | {
            "update": jax.tree.map(jnp.subtract, new.params, state.params),
            "buffers": new.buffers,
        }

    return jax.vmap(step, axis_name=AXIS_NAME, axis_size=world_size)(batch)


def rank0(tree: Any) -> Any:
    """Replica 0's."""
    return jax.tree.map(lambda leaf: leaf[0], tree)


def reference(scenario: Scenario) -> Reference:
    """The right translation, running freely."""
    port = scenario.port()
    functional, params, buffers = start(port, scenario.seed)
    state = TrainState(jnp.int32(0), params, buffers, port.flax_optimizer.init(params))
    run = Reference(scenario, [], [])
    for number in range(scenario.steps):
        new, stages = take(port, functional, state, stacked(port, scenario.world_size, number), scenario.world_size)
        run.states.append(state)
        run.stages.append(stages)
        state = rank0(new)
    return run


def stages_of(translation: Translation, right: Reference) -> Iterator[Stages]:
    """What a wrong translation does at each step, from where the right one was."""
    port, world_size = translation.port(), right.scenario.world_size
    functional, fresh, _ = start(port, right.scenario.seed)
    opt_state = port.flax_optimizer.init({**fresh, **right.states[0].params})
    for number, before in enumerate(right.states):
        params = {name: before.params.get(name, before.params.get("embed.embedding")) for name in fresh}
        params = {name: value.T if name == "head.kernel" else value for name, value in params.items()}
        buffers = {name: before.buffers[name] for name in functional.buffers}
        state = TrainState(before.step, params, buffers, opt_state)
        if number == port.restore_at:
            state = port.flax_restore(state)
        new, stages = take(port, functional, state, stacked(port, world_size, number), world_size)
        opt_state = rank0(new).opt_state
        yield stages


def only_updates(translation: Translation, right: Reference) -> Iterator[Stages]:
    """The same where the optimizer alone is another: it is given the right gradients."""
    port = translation.port()
    opt_state = port.flax_optimizer.init(right.states[0].params)
    for number, (before, theirs) in enumerate(zip(right.states, right.stages, strict=True)):
        state = dataclasses.replace(before, opt_state=opt_state)
        if number == port.restore_at:
            state = port.flax_restore(state)
        clipped = rank0(theirs["clipped_gradients"])
        updates, opt_state = port.flax_optimizer.update(clipped, state.opt_state, state.params)
        yield {"update": jax.tree.map(lambda u, p: (optax.apply_updates(p, u) - p)[None], updates, state.params)}


def first_difference(translation: Translation, right: Reference) -> tuple[int, str] | None:
    """The first step and stage that differ; None: nothing does."""
    port, correct = translation.port(), right.scenario.translation()
    if port.flax_start is not None and not same(right.states[0].params, port.flax_start(right.states[0].params, 1)):
        return 0, "params"
    steps = range(right.scenario.steps)
    other_data = next((step for step in steps if not same_batches(port, right.scenario, step)), len(steps))
    computing = ("model", "options", "loss", "step")
    if any(getattr(translation, name) != getattr(correct, name) for name in computing):
        run = stages_of(translation, right)
    else:
        run = only_updates(translation, right)
    for step, found in zip(range(other_data), run, strict=False):
        for stage in ORDER:
            if stage in found and distance(found[stage], right.stages[step][stage]) > FLOOR:
                return step, stage
    return None if other_data == len(steps) else (other_data, "samples")


def same_batches(port: Port, scenario: Scenario, step: int) -> bool:
    """Whether both sides are given the same."""
    if port.batch is not None:
        return True
    sides = [[port.micro_batches(step, rank, side) for rank in range(scenario.world_size)] for side in SIDES]
    pairs = zip(*(jax.tree.leaves(side) for side in sides), strict=True)
    return all(np.array_equal(one, other) for one, other in pairs)


def same(tree: Any, other: Any) -> bool:
    """Whether all tensors are."""
    return all(np.array_equal(one, other[name]) for name, one in tree.items())


def distance(found: Any, theirs: Any) -> float:
    """||found - theirs|| / ||theirs|| over the tensors that both have."""
    if not isinstance(found, dict):
        found, theirs = {"": found}, {"": theirs}
    off = sum(float(jnp.sum((found[name] - theirs[name]) ** 2)) for name in found.keys() & theirs.keys())
    return (off / max(sum(float(jnp.sum(value**2)) for value in theirs.values()), 1e-300)) ** 0.5
