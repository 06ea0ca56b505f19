"""Records of a torch rank's steps, taken by wrapping the loss, DDP's communication hook and the optimizer."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from jaxddp.parity.fingerprints import fingerprints
from jaxddp.parity.records import Record
from jaxddp.parity.torch_side.side import TorchSide
from torch_ref.distributed import World
from torch_ref.gradient_hooks import local_hooks
from torch_ref.losses import Batch, Sums
from torch_ref.step import global_count

Arrays = dict[str, np.ndarray]


class WatchedOptimizer:
    """An optimizer whose inputs are recorded before each step, and may be replaced.

    Args:
        optimizer: the optimizer to wrap.
        recorder: receives the parameters and gradients before each update.

    Attributes:
        gradients: gradients that replace the computed ones, by parameter name; None: no replacement.
    """

    def __init__(self, optimizer: Optimizer, recorder: "Recorder"):
        self.gradients: Arrays | None = None
        self.zero_grad, self.param_groups = optimizer.zero_grad, optimizer.param_groups
        self._optimizer = optimizer
        self._recorder = recorder

    def step(self) -> None:
        """Record the inputs and update the parameters."""
        recorder = self._recorder
        recorder.before_update(self._optimizer)
        if self.gradients is not None:
            for name, parameter in recorder.parameters.items():
                given = self.gradients.get(name)
                parameter.grad = None if given is None else torch.from_numpy(given).to(parameter)
        self._optimizer.step()


class Recorder:
    """Recorder of one step: losses, gradients before and after DDP's all-reduce, and the new state.

    Args:
        model: the module inside DDP.
        world: the ranks that take part.
        side: loss, hooks and facts of the training loop.

    Attributes:
        parameters: name -> parameter, tied ones under their first name.
        groups: the optimizer's parameter groups at the last step, as JSON can hold them; rank 0 only.
    """

    def __init__(self, model: nn.Module, world: World, side: TorchSide):
        self.model = model
        self.world = world
        self.parameters = dict(model.named_parameters())
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.groups: list[dict[str, Any]] = []
        self._side = side
        self.comm_hook = side.comm_hook(world)
        self.local_hooks = local_hooks(side.gradient_hooks, model)
        self.scaler = side.scaler or GradScaler(enabled=False)
        self._skipped = 0

    def start(self, micro_batches: Sequence[Batch]) -> None:
        """Begin a step: forget the last one and fingerprint the examples."""
        self.local: Arrays = {}
        self.reduced: Arrays = {}
        self.scale = self.scaler.get_scale()
        self._before: Arrays = {}
        self._losses: list[Sums] = []
        in_total = self._side.facts.loss_normalization == "global"
        self._total = float(global_count(micro_batches, self.world, self._side.count_fn)) if in_total else None
        self._samples = fingerprints([{name: to_numpy(x) for name, x in batch.items()} for batch in micro_batches])

    def loss_fn(self, model: nn.Module, batch: Batch) -> Sums:
        """Compute the side's loss and record it."""
        sums = self._side.loss_fn(model, batch)
        self._losses.append({name: value.detach() for name, value in sums.items()})
        return sums

    def before_update(self, optimizer: Optimizer) -> None:
        """Record parameters, clipped gradients and parameter groups before the optimizer's step; rank 0 only."""
        if self.world.rank > 0:
            return
        self._before = {name: to_numpy(p) for name, p in self.parameters.items()}
        self._clipped = {name: to_numpy(p.grad) for name, p in self.parameters.items() if p.grad is not None}
        self.groups = [_plain(group, self.names) for group in optimizer.param_groups]

    def unscaled(self, names: Sequence[str], bucket: dist.GradBucket) -> Arrays:
        """Return a bucket's gradients by name, divided by the loss scale."""
        return {name: to_numpy(value / self.scale) for name, value in zip(names, bucket.gradients(), strict=True)}

    def record(self, optimizer: Optimizer, averaged: AveragedModel | None = None) -> Record:
        """Return the record of the step that has just been taken; shared stages on rank 0 only."""
        state = {name: to_numpy(value) for name, value in self.model.state_dict().items()}
        compared = dict(self.model.named_buffers()).keys() - set(self._side.facts.no_twin)
        buffers = {name: value for name, value in state.items() if name in compared}
        mine = {
            "samples": self._samples,
            "local_loss": {"loss": self._local_loss()},
            "local_gradients": self.local,
            "local_buffers": buffers,
            **({"local_params": {n: state[n] for n in self.parameters}} if self._side.own_parameters else {}),
        }
        if self.world.rank > 0:
            return mine
        if not self._before:  # the loss scaler skipped the update
            self._skipped += 1
            self.before_update(optimizer)
        kept = {} if averaged is None else {n: to_numpy(p) for n, p in averaged.module.named_parameters()}
        return {
            **mine,
            **({"averaged": kept} if kept else {}),
            **({"scaler": self._of_scaler()} if self.scaler.is_enabled() else {}),
            "gradients": self.reduced,
            "clipped_gradients": self._clipped,
            "update": {name: state[name] - before for name, before in self._before.items()},
            "params": {name: state[name] for name in self.parameters},
            "buffers": buffers,
            "optimizer_state": self._state_of(optimizer),
        }

    def _state_of(self, optimizer: Optimizer) -> Arrays:
        return {
            f"{key}:{name}": to_numpy(value)
            for name, parameter in self.parameters.items()
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.shape == parameter.shape
        }

    def _of_scaler(self) -> Arrays:
        state = self.scaler.state_dict()
        values = {"loss_scale": state["scale"], "growth_tracker": state["_growth_tracker"], "skipped": self._skipped}
        return {name: np.asarray(value) for name, value in values.items()}

    def _local_loss(self) -> np.ndarray:
        if self._total is not None:
            return np.asarray(sum(float(s["loss"]) for s in self._losses) * self.world.world_size / self._total)
        return np.asarray(np.mean([float(s["loss"] / s["count"]) for s in self._losses]))


def recording_hook(recorder: Recorder, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Run the side's communication hook; record the gradients before and after it."""
    recorder.local_hooks(bucket)
    names = [recorder.names[id(parameter)] for parameter in bucket.parameters()]
    recorder.local |= recorder.unscaled(names, bucket)

    def keep(future: torch.futures.Future[Tensor]) -> Tensor:
        recorder.reduced |= recorder.unscaled(names, bucket)
        return future.value()

    state, hook = recorder.comm_hook
    return hook(state, bucket).then(keep)


def _plain(group: dict[str, Any], names: dict[int, str]) -> dict[str, Any]:
    """Return a parameter group as JSON can hold it: the parameters' names and all numeric options."""
    options = {key: _number(value) for key, value in group.items() if key != "params"}
    of_group: Iterable[nn.Parameter] = group["params"]
    return {"names": [names[id(p)] for p in of_group], **{k: v for k, v in options.items() if v is not None}}


def _number(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list) and all(isinstance(x, int | float) for x in value):
        return list(value)
    return value if isinstance(value, int | float) else None


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Copy a tensor into a NumPy array."""
    return tensor.detach().clone().cpu().numpy()
