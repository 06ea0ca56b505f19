"""Compiled step of a large port, which returns excerpts under torch's names, so that no full gradient leaves it.

On the CPU its replicas share one device, and one copy of the weights and of the optimizer's state. A port of many
parameters, however small, has this step too, since XLA compiles a mapped one in a time that grows with their square.
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
import optax
from jax import numpy as jnp

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.replicas import Replicas, VirtualReplicas
from jaxddp.parity.case_interface import AnyCase
from jaxddp.parity.excerpts import excerpts, is_large
from jaxddp.parity.jax_side.checked_step import (
    CheckedStep,
    Stages,
    Update,
    clips_not,
    record_of,
    replicas_of,
    side_of,
    slices_of,
    stages_of_optimizer,
)
from jaxddp.parity.jax_side.custom_step import CustomStep
from jaxddp.parity.jax_side.side import JaxSide
from jaxddp.parity.lazy_arrays import Arrays, Joined
from jaxddp.parity.processes import give_back_memory
from jaxddp.parity.projections import projections_of
from jaxddp.parity.records import Tensors, is_large_model
from jaxddp.state import Buffers, Params, TrainState
from jaxddp.step.replica_step import ReplicaStep

FREE = ("local_loss", "pure_local_loss", "params", "buffers")  # stages of a free run that are recorded
MANY = 300  # arrays; of a port with more, XLA takes longest to compile the kernels
# Measured for 1,000 arrays of 3 elements, in seconds of CPU: 59 mapped, 37 on one device, 8 with these options too.
QUICKLY: dict[str, Any] = {"xla_backend_optimization_level": 0}
if version("jaxlib").startswith("0.10."):  # later versions may not have this option
    QUICKLY["xla_cpu_use_fusion_emitters"] = False
OF_OPTIMIZER = ("update", "optimizer_state", "optimizer_projections")
SQUARES, PROJECTED, LACKING = "squares", "projected", "lacking"  # further outputs of the program


@dataclass(frozen=True)
class ExcerptProgram(CheckedStep):
    """A large port's step, whose stages are excerpts; see `excerpt_program`.

    Attributes:
        alone: the step computes gradients only; the optimizer is a second program.
        options: XLA's options.
        compiled: programs by the shapes of their arguments.
    """

    alone: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    compiled: dict[Any, Any] = field(default_factory=dict)

    def start(self, params: Params, buffers: Buffers) -> TrainState:
        """Return the state before the first step, on the devices."""
        return self.placed(self.side.replica_step.init(params, buffers))

    def placed(self, state: TrainState) -> TrainState:
        """Copy a replica's state to the devices; arrays on the only device stay where they are."""
        state = dataclasses.replace(state, opt_state=optax.EmptyState()) if self.alone else state
        return jax.tree.map(jnp.asarray, state) if self._virtual else super().placed(state)

    def placed_again(self, state: TrainState) -> TrainState:
        """Place the state that a step has returned."""
        return self.placed(state) if self._virtual else super().placed_again(state)

    def step(self, state: TrainState, batch: MicroBatches) -> tuple[TrainState, Stages]:
        """Take a step from a state on the devices; the state is donated if the program updates it."""
        if not self._virtual:
            return super().step(state, batch)
        # Arguments are placed as jax places results: with another placement the second step would compile again.
        arguments = state, jax.tree.map(jnp.asarray, batch)
        program = self._program_for(arguments)
        # Frees memory of the compiler and of the step before; measured: 0.5 and 0.3 GiB for 124 million parameters.
        give_back_memory()
        # The step ends, and frees its memory, before anything else is read.
        done: tuple[TrainState, Stages] = jax.block_until_ready(program(*arguments))
        return done

    def record(self, stages: Stages, batch: MicroBatches) -> dict[str, Tensors]:
        """Return the record of the stages; each is dropped once it is recorded, to free its memory."""
        stages.pop(LACKING, None)
        squares, projected = jax.device_get(stages.pop(SQUARES)), jax.device_get(stages.pop(PROJECTED))
        of_optimizer = {stage: stages.pop(stage) for stage in OF_OPTIMIZER if stage in stages}

        def of_large(stage: str, rank: int, tensors: dict[str, np.ndarray]) -> tuple[Tensors, Tensors, Tensors]:
            norms = {name: np.sqrt(np.sum(x[rank])) for name, x in squares.get(stage, {}).items()}
            return tensors, norms, slices_of(projected.get(stage, {}), rank)

        record = record_of(stages, self.side, batch, of_large)
        return record | {stage: slices_of(tensors, 0) for stage, tensors in of_optimizer.items()}

    def given(self, stages: Stages, of_torch: Arrays, start: Arrays) -> Params:
        """Return the reference's gradients, and jax's where torch has none; see `CheckedStep.given`."""
        return self.side.from_torch(Joined(of_torch, slices_of(stages[LACKING], 0), start), adds=False)[0]

    def of_custom_step(self, after: TrainState, params: Params) -> dict[str, Tensors]:
        """Return nothing, because these stages are among the program's."""
        return {}

    def updating(self) -> Update:
        """Return (gradients, optimizer's state, params) -> (stages of the optimizer, its next state)."""

        @partial(jax.jit, donate_argnums=1, compiler_options=dict(self.options))
        def update(gradients: Params, opt_state: Any, params: Params) -> tuple[dict[str, Any], Any]:
            updates, opt_state = self.optimizer.update(gradients, opt_state, params)
            return stages_of_optimizer(self.side, updates, opt_state, params, jnp), opt_state

        def updated(gradients: Params, opt_state: Any, params: Params) -> tuple[dict[str, Tensors], Any]:
            stages, opt_state = update(gradients, opt_state, params)
            return jax.device_get(stages), opt_state

        return updated

    def _program_for(self, arguments: tuple[Any, ...]) -> Any:
        """Return `run`, compiled for arguments of these shapes."""
        shapes = jax.tree.structure(arguments), tuple(map(jax.typeof, jax.tree.leaves(arguments)))
        if shapes not in self.compiled:
            self.compiled[shapes] = self.run.lower(*arguments).compile(compiler_options=dict(self.options))
        return self.compiled[shapes]

    @property
    def _virtual(self) -> bool:
        return isinstance(self.replicas, VirtualReplicas)


def excerpt_program(case: AnyCase, start: Arrays, forced: bool, lacking: Collection[str] = ()) -> ExcerptProgram:
    """Build the program of a large port, or of one with many parameters.

    Memory measured for Adam in float64 with two replicas, in copies of the weights, including 2 for the optimizer's
    state: 4.6 for a free step, 4.6 for the gradients of a forced step, and 4 for its optimizer.

    Args:
        case: the port.
        start: initial weights.
        forced: whether the run is forced. A forced step returns all stages, except that jaxddp's step returns no
            parameters, since its optimizer is a second program. A free step returns the stages in `FREE`.
        lacking: torch's parameters for which the reference has no gradients; jax's gradients are returned in full.
    """
    side = side_of(case)
    step, is_custom = side.replica_step, isinstance(side.replica_step, CustomStep)
    if isinstance(step, ReplicaStep) and forced:
        step = dataclasses.replace(step, optimizer=optax.set_to_zero())

    def of_replica(state: TrainState, batch: MicroBatches) -> tuple[TrainState, Stages]:
        after, _, stages = step(state, batch)
        if not forced:
            return after, _shown({stage: stages[stage] for stage in FREE if stage in stages}, side)
        if clips_not(step):
            del stages["clipped_gradients"]
        shown = _shown(stages, side)
        if is_custom:
            updates = {name: x - state.params[name] for name, x in stages["params"].items()}
            return after, shown | stages_of_optimizer(side, updates, after.opt_state, state.params, jnp)
        del shown["params"]
        gradients = side.to_torch(stages.get(side.given, stages["gradients"]), jnp) if lacking else {}
        shown[LACKING] = {name: x for name, x in gradients.items() if name in lacking}
        return dataclasses.replace(after, params={}, opt_state=()), shown

    def mapped_on(replicas: Replicas) -> Any:
        donated = () if forced and not is_custom else (0,)  # the optimizer needs the parameters later
        if not isinstance(replicas, VirtualReplicas):
            return replicas.map(of_replica, (step.axes, 0), (step.axes, 0), donate=donated)
        mapped = replicas.map(of_replica, (step.axes, 0), 0)  # all outputs by replica, in case they differ

        def of_all(state: TrainState, batch: MicroBatches) -> tuple[TrainState, Stages]:
            after, stages = mapped(state, batch)
            return jax.tree.map(lambda x: x[0], after), stages

        return jax.jit(of_all, donate_argnums=donated)

    on_devices = replicas_of(case)
    on_one = on_devices.in_one_process and on_devices.devices[0].platform == "cpu"
    replicas = VirtualReplicas(case.world_size, on_devices.devices[0]) if on_one else on_devices
    options = {} if is_large_model(start) or not on_one else QUICKLY
    program = ExcerptProgram(side, replicas, mapped_on(replicas), forced and not is_custom, options)
    if is_custom and replicas is not on_devices and not _can_run(program, case, start):
        return ExcerptProgram(side, on_devices, mapped_on(on_devices))
    return program


def _can_run(program: CheckedStep, case: AnyCase, start: Arrays) -> bool:
    """Return whether vmap can trace a port's `jax_step`; it maps less than pmap, for example no groups of replicas."""
    state = jax.eval_shape(program.side.replica_step.init, *program.side.from_torch(start))
    try:
        jax.eval_shape(program.run, state, next(iter(case.batches())))
    except Exception:  # if pmap fails too, its error is reported
        return False
    return True


def _shown(stages: Stages, side: JaxSide) -> Stages:
    """Return, within a program, excerpts of the stages under torch's names, and of large gradients more.

    These are sums of squares, and projections.
    """
    shown: Stages = {SQUARES: {}, PROJECTED: {}}
    for stage, arrays in stages.items():
        if stage.endswith("local_loss"):
            shown[stage] = arrays
            continue
        tensors = side.to_torch(arrays, jnp)
        shown[stage] = tensors if stage == "buffers" else excerpts(tensors)
        if stage.endswith("gradients"):
            large = {name: x for name, x in tensors.items() if is_large(x.shape)}
            shown[PROJECTED][stage] = projections_of(large, is_large, jnp)
            # Torch's first axis is jax's last, which is contiguous: a fast sum. NumPy sums the rest more exactly.
            shown[SQUARES][stage] = {name: jnp.sum(x * x, axis=0) for name, x in large.items()}
    return shown
