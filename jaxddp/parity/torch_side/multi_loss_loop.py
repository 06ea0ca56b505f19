"""A rank's `torch_step`: a step of several losses, models or optimizers, watched. Imports no jax.

Nothing wraps the modules, so that a step may call any of their methods: hooks average the gradients like DDP.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from jaxddp.errors import InputError
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.processes import Tell
from jaxddp.parity.records import KIND, NUMBER, Record
from jaxddp.parity.torch_side.rank_recorder import RankRecorder
from jaxddp.parity.torch_side.side import TorchSide, in_floats
from torch_ref.distributed import World
from torch_ref.losses import Batch
from torch_ref.program_step import AveragedGradients, Optimizers


class StepRecorder(RankRecorder):
    """RankRecorder of a step of several losses: the losses, the gradients of each optimizer, and the new state.

    Attributes:
        given: gradients that replace the computed ones, by parameter name; None: no replacement.
        records_given: see `jaxddp.parity.torch_side.rank_recorder.WatchedOptimizer`.
    """

    def __init__(self, model: nn.Module, world: World, side: TorchSide, keeps_full: bool = False):
        super().__init__(model, world, side, keeps_full)
        self.given: Arrays | None = None
        self.records_given = False
        self.losses: dict[str, float] = {}

    def start(self, micro_batches: Sequence[Batch]) -> None:
        """Begin a step; see `RankRecorder.start`."""
        super().start(micro_batches)
        self.note_before()
        self._averaged: dict[str, Tensor] = {}
        self._clipped: dict[str, np.ndarray] = {}

    def averaged(self, parameters: Sequence[nn.Parameter]) -> None:
        """Record the gradients of parameters after they are averaged, before the step clips them."""
        if self._side.facts.clips_inside:
            self._averaged |= {self.names[id(p)]: p.grad.detach().clone() for p in parameters if p.grad is not None}

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Record an optimizer's gradients, or replace them."""
        if any(x is not None for x in (*args[1:], *kwargs.values())):
            raise InputError("torch_step: calls step with a closure; must call loss.backward(), then step()")
        of_groups = [p for group in optimizer.param_groups for p in group["params"]]
        if self.records_given:
            self._replace(of_groups)
        gradients = {self.names[id(p)]: p.grad.detach().clone() for p in of_groups if p.grad is not None}
        if again := gradients.keys() & self._clipped.keys():
            raise InputError(
                f"torch_step: updates {min(again)} twice, by two optimizers or by two steps of one; must update a "
                "parameter once in a step"
            )
        self._clipped |= self._taken("clipped_gradients", gradients)
        self._keep_full("clipped_gradients", gradients)
        unclipped = {name: self._averaged.get(name, x) for name, x in gradients.items()}
        self.reduced |= self._taken("gradients", unclipped)
        if self._side.facts.clips_inside:
            self._keep_full("gradients", unclipped)
        if not self.records_given:
            self._replace(of_groups)

    def _replace(self, parameters: Sequence[nn.Parameter]) -> None:
        if self.given is not None:
            for parameter in parameters:
                given = self.given.get(self.names[id(parameter)])
                parameter.grad = None if given is None else torch.from_numpy(given).to(parameter)

    def _local_losses(self) -> dict[str, np.ndarray]:
        return {name: np.asarray(value) for name, value in self.losses.items()}


class MultiLossLoop:
    """A loop whose steps are a port's `torch_step`; see `jaxddp.parity.torch_side.ddp_loop.DdpLoop`."""

    def __init__(self, side: TorchSide, world: World, keeps_full: bool, tell: Tell):
        assert side.torch_step is not None, "a port with a torch_step"
        self._side, self._world, self._step = side, world, side.torch_step
        self.recorder = StepRecorder(side.model, world, side, keeps_full)
        AveragedGradients(side.model, world, self.recorder.averaged)
        tell("configure_optimizers")
        self._made = self._step.configure(side.model)
        self.optimizer = Optimizers(self._made, side.model)
        self.schedulers, self.kind = self.optimizer.schedulers, self.optimizer.kind
        for optimizer in self.optimizer.each:
            optimizer.register_step_pre_hook(self.recorder.before_step)

    def take(
        self, micro_batches: Sequence[Batch], step: int, gradients: Arrays | None = None, records_given: bool = False
    ) -> Record:
        """Take a step and return its record; see `DdpLoop.take`."""
        recorder = self.recorder
        recorder.given, recorder.records_given = gradients, records_given
        recorder.start(micro_batches)
        recorder.note_groups(self.optimizer.param_groups)
        kinds = [(k, one) for k, one in enumerate(self.optimizer.each) for _ in one.param_groups]
        for group, (number, one) in zip(recorder.groups, kinds, strict=True):
            group |= {NUMBER: number, KIND: type(one).__name__}
        for buffer in self._side.model.buffers():  # like DDP before a forward pass
            self._world.broadcast(buffer)
        recorder.losses = in_floats(self._step.losses(self._side.model, self._made, micro_batches[0]))
        return recorder.record(self.optimizer)
