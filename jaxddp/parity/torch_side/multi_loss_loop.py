"""A rank's `torch_step`: a step of several losses, models or optimizers, watched. Imports no jax.

Nothing wraps the modules, so that a step may call any of their methods: hooks average the gradients as DDP does.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from jaxddp.errors import InputError
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.processes import Tell
from jaxddp.parity.records import KIND, NUMBER, Record
from jaxddp.parity.torch_side.recorder import Recorder, excerpt_of, to_numpy
from jaxddp.parity.torch_side.side import TorchSide
from torch_ref.distributed import World
from torch_ref.losses import Batch


class AveragedGradients:
    """Hooks that average gradients over the ranks at the end of every backward pass, as DDP does.

    With W ranks, `.grad` holds (1 / W) sum_r g_r, where rank r has accumulated g_r. A parameter that a rank's loss does
    not reach counts as 0 on this rank; one that no rank reaches keeps its gradient.

    Args:
        model: its parameters' gradients are averaged.
        world: the ranks; all make equally many backward passes.
        then: called after each average with the parameters that a loss reached.
    """

    def __init__(self, model: nn.Module, world: World, then: Callable[[Sequence[nn.Parameter]], None]):
        self._parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
        self._world, self._then = world, then
        self._reached: set[int] = set()
        for number, parameter in enumerate(self._parameters):
            learns = parameter.requires_grad
            parameter.requires_grad_(True)  # torch adds hooks to no other; a step may unfreeze it later
            parameter.register_post_accumulate_grad_hook(partial(self._reach, number))
            parameter.requires_grad_(learns)

    def _reach(self, number: int, _: Tensor) -> None:
        if not self._reached:
            Variable._execution_engine.queue_callback(self._average)
        self._reached.add(number)

    def _average(self) -> None:
        reached = torch.zeros(len(self._parameters), device=self._world.device)
        reached[sorted(self._reached)] = 1.0
        self._reached = set()
        of_any_rank = [self._parameters[int(i)] for i in self._world.all_reduce(reached, "max").nonzero()]
        for parameter in of_any_rank:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self._world.all_reduce(gradient.div_(self._world.world_size))
        self._then(of_any_rank)


class Optimizers:
    """All optimizers of a port, with the interface of one.

    Args:
        made: what `configure_optimizers` returned: optimizers, and schedulers, in lists, tuples and dictionaries.
        model: the module whose parameters they hold.

    Attributes:
        each: the optimizers.
        schedulers: the schedulers.
        param_groups: the groups of all optimizers.
        kind: their class name, or names if they differ.

    Raises:
        InputError: there is no optimizer, or one holds a tensor that is not a parameter of the module.
    """

    def __init__(self, made: Any, model: nn.Module):
        leaves = [*_leaves(made)]
        self.each = [leaf for leaf in leaves if isinstance(leaf, Optimizer)]
        self.schedulers = [leaf for leaf in leaves if isinstance(leaf, LRScheduler)]
        if not self.each:
            kind = type(made).__name__
            raise InputError(f"configure_optimizers: must return the optimizers of the torch_step, and returns {kind}")
        self.param_groups: list[dict[str, Any]] = [group for one in self.each for group in one.param_groups]
        known = {id(parameter) for parameter in model.parameters()}
        if odd := [tuple(p.shape) for group in self.param_groups for p in group["params"] if id(p) not in known]:
            raise InputError(
                f"configure_optimizers: an optimizer holds a tensor {odd[0]} that torch_model's module does not; make "
                "it a torch.nn.Parameter of the module"
            )
        self.kind = ", ".join(dict.fromkeys(type(one).__name__ for one in self.each))

    @property
    def state(self) -> Mapping[Any, Any]:
        """Return the states of all optimizers by parameter."""
        return {parameter: state for one in self.each for parameter, state in one.state.items()}

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for optimizer in self.each:
            optimizer.zero_grad()


def _leaves(made: Any) -> Iterator[Any]:
    if isinstance(made, Mapping | list | tuple):
        for item in made.values() if isinstance(made, Mapping) else made:
            yield from _leaves(item)
    else:
        yield made


class StepRecorder(Recorder):
    """Recorder of a step of several losses: the losses, the gradients of each optimizer, and the new state.

    Attributes:
        given: gradients that replace the computed ones, by parameter name; None: no replacement.
    """

    def __init__(self, model: nn.Module, world: World, side: TorchSide, keeps_full: bool = False):
        super().__init__(model, world, side, keeps_full)
        self.given: Arrays | None = None
        self.losses: dict[str, float] = {}

    def start(self, micro_batches: Sequence[Batch]) -> None:
        """Begin a step; see `Recorder.start`."""
        super().start(micro_batches)
        self._before = {name: to_numpy(excerpt_of(p)) for name, p in self.parameters.items()}
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
        gradients = {self.names[id(p)]: p.grad.detach().clone() for p in of_groups if p.grad is not None}
        if again := gradients.keys() & self._clipped.keys():
            raise InputError(
                f"torch_step: updates {min(again)} twice, by two optimizers or by two steps of one; must update a "
                "parameter once in a step"
            )
        self._clipped |= self._taken("clipped_gradients", gradients)
        self._keep_whole("clipped_gradients", gradients)
        unclipped = {name: self._averaged.get(name, x) for name, x in gradients.items()}
        self.reduced |= self._taken("gradients", unclipped)
        if self._side.facts.clips_inside:
            self._keep_whole("gradients", unclipped)
        if self.given is None:
            return
        for parameter in of_groups:
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

    def take(self, micro_batches: Sequence[Batch], step: int, gradients: Arrays | None = None) -> Record:
        """Take a step and return its record; see `DdpLoop.take`."""
        recorder = self.recorder
        recorder.given = gradients
        recorder.start(micro_batches)
        recorder.note_groups(self.optimizer.param_groups)
        kinds = [(k, one) for k, one in enumerate(self.optimizer.each) for _ in one.param_groups]
        for group, (number, one) in zip(recorder.groups, kinds, strict=True):
            group |= {NUMBER: number, KIND: type(one).__name__}
        for buffer in self._side.model.buffers():  # as DDP does before a forward pass
            self._world.broadcast(buffer)
        recorder.losses = self._step.losses(self._side.model, self._made, micro_batches[0])
        return recorder.record(self.optimizer)
