"""Takes a translation's steps on virtual replicas, to see at which stage a planted fault shows first.

Every step starts from where the right translation was; the optimizer alone keeps its state.
"""

import dataclasses
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jaxddp.collectives import AXIS_NAME
from jaxddp.functional import Functional, LocalLoss, cast
from jaxddp.losses import Losses
from jaxddp.parity.convert import Converter
from jaxddp.parity.port import Port
from jaxddp.state import TrainState

from . import rehearsal_torch
from .scenarios import Scenario, Translation

Tree = dict[str, Any]
Stages = dict[str, Any]  # stage -> tensors, each with a leading axis for the replica

ORDER = ("local_loss", "local_gradients", "gradients", "clipped_gradients", "update", "buffers")
SIDES = ("torch", "flax")
MANY = "mlp"  # has so many faults that one operation after the other takes less time than compiling each
FLOOR = 1e-11  # what is above it differs


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


@cache
def pure(model: Any, options: tuple[tuple[str, Any], ...], loss: Any) -> tuple[Functional, LocalLoss]:
    """A flax model, and its loss as sums, whatever it returns."""
    functional = Functional(model(**dict(options)))

    def losses(module: Any, batch: Any) -> Losses:
        found = loss(module, batch)
        values, weights = found if isinstance(found, tuple) else (found, None)
        return Losses(jnp.atleast_1d(values), weights)

    return functional, jax.jit(functional.local_loss(losses, train=True))


def pure_of(translation: Translation) -> tuple[Functional, LocalLoss]:
    """The same of a translation."""
    return pure(translation.model, tuple(sorted(translation.options.items())), translation.loss)


def start(translation: Translation) -> tuple[Any, Any]:
    """Parameters and buffers, as torch's model starts."""
    functional, _ = pure_of(translation)
    arrays = converter(translation).to_flax(rehearsal_torch.start(translation.scenario))
    params, buffers = ({name: arrays[name] for name in kind} for kind in (functional.params, functional.buffers))
    return cast(params, jnp.float64), cast(buffers, jnp.float64)


def converter(translation: Translation) -> Converter:
    """Between the translation's tensors and torch's."""
    functional, _ = pure_of(translation)
    shapes = {name: value.shape for name, value in {**functional.params, **functional.buffers}.items()}
    return Converter(translation.port().torch_model(), shapes)


def stacked(port: Port, world_size: int, step: int) -> Any:
    """The batches of all replicas, leaves (W, A, B, ...)."""
    of_ranks = [port.micro_batches(step, rank, "flax") for rank in range(world_size)]
    return {
        name: np.stack([np.stack([micro[name] for micro in micros]) for micros in of_ranks]) for name in of_ranks[0][0]
    }


def take(translation: Translation, optimizer: Any, state: TrainState, batch: Any) -> tuple[Any, Stages]:
    """One step from one state: the next one's parts and the stages, with the replicas as leading axis."""
    setting, (_, loss) = translation.scenario.setting, pure_of(translation)
    own = translation.own_step
    if translation.step is None and translation.scenario.loss_normalization == "global":
        own = dataclasses.replace(own, count=lambda part: loss(state.params, state.buffers, part)[0]["count"])

    def mean(params: Any, buffers: Any, batch: Any) -> Any:
        sums, new_buffers = loss(params, buffers, batch)
        return sums["loss"] / sums["count"], new_buffers

    def step(batch: Any) -> Any:
        batch = batch if setting.accumulation_steps > 1 else {name: array[0] for name, array in batch.items()}
        new, stages = own(mean, optimizer, state, batch)
        update = jax.tree.map(jnp.subtract, new.params, state.params)
        return new, {**stages, "update": update, "buffers": new.buffers}

    return jax.vmap(step, axis_name=AXIS_NAME, axis_size=translation.scenario.world_size)(batch)


def rank0(tree: Any) -> Any:
    """Replica 0's."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), jax.device_get(tree))


@cache
def reference(scenario: Scenario) -> Reference:
    """The right translation, running freely."""
    translation = scenario.translation()
    port, (params, buffers) = translation.port(), start(translation)
    state = TrainState(jnp.int32(0), params, buffers, port.flax_optimizer.init(params))
    run, compiled = Reference(scenario, [], []), jax.jit(partial(take, translation, port.flax_optimizer))
    for number in range(scenario.steps):
        new, stages = compiled(state, stacked(port, scenario.world_size, number))
        run.states.append(state)
        run.stages.append(stages)
        state = rank0(new)
    return run


def stages_of(translation: Translation, right: Reference) -> Iterator[Stages]:
    """What a wrong translation does at each step, from where the right one was."""
    port, optimizer = translation.port(), translation.port().flax_optimizer
    theirs, mine = converter(right.scenario.translation()), converter(translation)
    opt_state, step = None, partial(take, translation, optimizer)
    if right.scenario.name != MANY:
        step = jax.jit(step)
    for number, before in enumerate(right.states):
        arrays = cast(mine.to_flax(theirs.to_torch({**before.params, **before.buffers})), jnp.float64)
        functional, _ = pure_of(translation)
        params, buffers = ({name: arrays[name] for name in kind} for kind in (functional.params, functional.buffers))
        opt_state = optimizer.init(params) if opt_state is None else opt_state
        state = TrainState(before.step, params, buffers, opt_state)
        if number == port.restore_at:
            state = port.flax_restore(state)
        batch = stacked(port, right.scenario.world_size, number)
        new, stages = step(state, batch)
        opt_state = rank0(new).opt_state
        yield stages


def updates_of(translation: Translation) -> Iterator[Tree]:
    """What the optimizer makes of random gradients, of the size of real ones; unused layers have none."""
    port, (params, buffers) = translation.port(), start(translation)
    opt_state = port.flax_optimizer.init(params)
    rng = np.random.default_rng(translation.scenario.seed)
    for number in range(translation.scenario.steps):
        gradients = {
            name: jnp.asarray(0.0 if name.startswith("unused") else 0.1 * rng.normal(size=value.shape)) + 0 * value
            for name, value in params.items()
        }
        state = TrainState(jnp.int32(number), params, buffers, opt_state)
        if number == port.restore_at:
            state = port.flax_restore(state)
        updates, opt_state = port.flax_optimizer.update(gradients, state.opt_state, params)
        yield updates


def differences(translation: Translation) -> Iterator[str | None]:
    """Of every step, the first stage that differs: computed only as far as it may."""
    scenario, correct = translation.scenario, translation.scenario.translation()
    if any(getattr(translation, name) != getattr(correct, name) for name in ("model", "options", "loss", "step")):
        for found, theirs in zip(stages_of(translation, reference(scenario)), reference(scenario).stages, strict=True):
            off = (stage for stage in ORDER if stage in found and distance(found[stage], theirs[stage]) > FLOOR)
            yield next(off, None)
    elif translation.optimizer != correct.optimizer or translation.restore:
        for found, theirs in zip(updates_of(translation), updates_of(correct), strict=True):
            yield "update" if distance(found, theirs) > FLOOR else None
    else:
        yield from [None] * scenario.steps


def first_difference(translation: Translation) -> tuple[int, str] | None:
    """The first step (from 1) and stage that differ; None: nothing does."""
    port, scenario = translation.port(), translation.scenario
    params, _ = start(translation)
    if port.flax_start and any(np.any(x != params[name]) for name, x in port.flax_start(params, 1).items()):
        return 1, "params"
    samples = [same_batches(port, scenario, step) for step in range(scenario.steps)]
    for step, (same, stage) in enumerate(zip(samples, differences(translation), strict=True)):
        if stage or not same:
            return step + 1, stage if same else "samples"
    return None


def same_batches(port: Port, scenario: Scenario, step: int) -> bool:
    """Whether both sides are given the same."""
    if port.batch is not None:
        return True
    sides = [[port.micro_batches(step, rank, side) for rank in range(scenario.world_size)] for side in SIDES]
    pairs = zip(*(jax.tree.leaves(side) for side in sides), strict=True)
    return all(np.array_equal(one, other) for one, other in pairs)


def distance(found: Any, theirs: Any) -> float:
    """||found - theirs|| / ||theirs|| over the tensors that both have."""
    if not isinstance(theirs, dict):
        found, theirs = {"": found}, {"": theirs}
    found, theirs = jax.device_get((found, theirs))
    off = sum(float(np.sum((found[name] - theirs[name]) ** 2)) for name in found.keys() & theirs.keys())
    return (off / (sum(float(np.sum(value**2)) for value in theirs.values()) or 1.0)) ** 0.5
