"""What a torch rank sees of its steps, written down by listeners: to the loss, to DDP's reduction, to the optimizer."""

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


class Watched:
    """An optimizer that shows what it is given and what it makes of it; its gradients may be replaced."""

    def __init__(self, optimizer: Optimizer, recorder: "Recorder"):
        self.gradients: Arrays | None = None
        self.zero_grad, self.param_groups = optimizer.zero_grad, optimizer.param_groups
        self._optimizer = optimizer
        self._recorder = recorder

    def step(self) -> None:
        recorder = self._recorder
        recorder.before_update(self._optimizer)
        if self.gradients is not None:
            for name, parameter in recorder.parameters.items():
                given = self.gradients.get(name)
                parameter.grad = None if given is None else torch.from_numpy(given).to(parameter.dtype)
        self._optimizer.step()


class Recorder:
    """Listens to a step: the losses, the gradients before and after DDP's all-reduce, the new state."""

    def __init__(self, model: nn.Module, world: World, side: TorchSide):
        self.model = model
        self.world = world
        self.parameters = dict(model.named_parameters())
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.groups: list[dict[str, Any]] = []  # of rank 0 only
        self._side = side
        self.comm_hook = side.comm_hook(world)
        self.local_hooks = local_hooks(side.gradient_hooks, model)
        self.scaler = side.scaler or GradScaler(enabled=False)
        self._skipped = 0

    def start(self, micro_batches: Sequence[Batch]) -> None:
        self.local: Arrays = {}
        self.reduced: Arrays = {}
        self.scale = self.scaler.get_scale()
        self._before: Arrays = {}
        self._losses: list[Sums] = []
        in_total = self._side.facts.loss_normalization == "global"
        self._total = float(global_count(micro_batches, self.world, self._side.count_fn)) if in_total else None
        self._samples = fingerprints([{name: x.numpy() for name, x in batch.items()} for batch in micro_batches])

    def loss_fn(self, model: nn.Module, batch: Batch) -> Sums:
        sums = self._side.loss_fn(model, batch)
        self._losses.append({name: value.detach() for name, value in sums.items()})
        return sums

    def before_update(self, optimizer: Optimizer) -> None:
        if self.world.rank > 0:
            return
        self._before = {name: to_numpy(p) for name, p in self.parameters.items()}
        self._clipped = {name: to_numpy(p.grad) for name, p in self.parameters.items() if p.grad is not None}
        self.groups = [_plain(group, self.names) for group in optimizer.param_groups]

    def unscaled(self, names: Sequence[str], bucket: dist.GradBucket) -> Arrays:
        """A bucket's gradients, of the loss as it was before it was scaled."""
        return {name: to_numpy(value / self.scale) for name, value in zip(names, bucket.gradients(), strict=True)}

    def record(self, optimizer: Optimizer, averaged: AveragedModel | None = None) -> Record:
        state = {name: to_numpy(value) for name, value in self.model.state_dict().items()}
        buffers = {name: value for name, value in state.items() if name in dict(self.model.named_buffers())}
        mine = {
            "samples": self._samples,
            "local_loss": {"loss": self._local_loss()},
            "local_gradients": self.local,
            "local_buffers": buffers,
            **({"local_params": {n: state[n] for n in self.parameters}} if self._side.own_parameters else {}),
        }
        if self.world.rank > 0:
            return mine
        if not self._before:  # a step that was skipped
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
    """The side's own hook, with an eye on what goes in and what comes out."""
    recorder.local_hooks(bucket)
    names = [recorder.names[id(parameter)] for parameter in bucket.parameters()]
    recorder.local |= recorder.unscaled(names, bucket)

    def keep(future: torch.futures.Future[Tensor]) -> Tensor:
        recorder.reduced |= recorder.unscaled(names, bucket)
        return future.value()

    state, hook = recorder.comm_hook
    return hook(state, bucket).then(keep)


def _plain(group: dict[str, Any], names: dict[int, str]) -> dict[str, Any]:
    """A parameter group as JSON can hold it: the parameters' names, and all options that are numbers."""
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
    return tensor.detach().clone().numpy()
