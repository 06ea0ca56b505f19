"""Record a torch rank's steps by wrapping the loss, DDP's communication hook and the optimizer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from jaxddp.parity.excerpts import distance
from jaxddp.parity.fingerprints import fingerprints
from jaxddp.parity.port.draws import examples_of
from jaxddp.parity.projections import projections
from jaxddp.parity.records import Record
from jaxddp.parity.torch_side.shared import SharedParameters
from jaxddp.parity.torch_side.side import TorchSide
from torch_ref.distributed import World
from torch_ref.gradient_hooks import local_hooks
from torch_ref.losses import Batch, LossFunction, Sums
from torch_ref.step import global_count

Arrays = dict[str, np.ndarray]


class HasState(Protocol):
    """An optimizer, or several with the interface of one."""

    @property
    def param_groups(self) -> Sequence[dict[str, Any]]:
        """Groups of parameters, with their options."""

    @property
    def state(self) -> Mapping[Any, Any]:
        """Optimizer state by parameter."""


class WatchedOptimizer:
    """An optimizer whose inputs are recorded before each step, and may be replaced.

    Args:
        optimizer: the optimizer to wrap.
        recorder: receives the parameters and gradients before each update.
        shared: parameters that rank 0 updates for all ranks; None: each rank updates its own.

    Attributes:
        gradients: gradients that replace the computed ones, by parameter name; None: no replacement.
        records_given: the record has them as the optimizer's, not the computed ones.
    """

    def __init__(self, optimizer: Optimizer, recorder: "RankRecorder", shared: SharedParameters | None = None):
        self.gradients: Mapping[str, np.ndarray] | None = None
        self.records_given = False
        self.zero_grad, self.param_groups = optimizer.zero_grad, optimizer.param_groups
        self._optimizer = optimizer
        self._recorder, self._shared = recorder, shared

    def step(self) -> None:
        """Record the inputs and update the parameters."""
        if self.records_given:
            self._replace()
        with nullcontext() if self._shared is None else self._shared.on_disk():
            self._recorder.before_update(self._optimizer)
        if not self.records_given:
            self._replace()
        if self._shared is None:
            self._optimizer.step()
        else:
            self._shared.update(self._optimizer)

    def _replace(self) -> None:
        if self.gradients is not None:
            for name, parameter in self._recorder.parameters.items():
                given = self.gradients.get(name)
                parameter.grad = None if given is None else torch.from_numpy(given).to(parameter)


class RankRecorder:
    """Record one step: losses, gradients before and after DDP's all-reduce, and the new state.

    Args:
        model: the module inside DDP.
        world: the ranks that take part.
        side: loss, hooks and facts of the training loop.
        keeps_full: keep large parameters, and the gradients that the optimizers get, in full.

    Attributes:
        parameters: name -> parameter, tied ones under their first name.
        computes: the loss to record.
        groups: the optimizer's parameter groups at the last step, as JSON can hold them; rank 0 only.
    """

    def __init__(self, model: nn.Module, world: World, side: TorchSide, keeps_full: bool = False):
        self.model = model
        self._keeps_full = keeps_full and world.rank == 0
        self.world = world
        self.parameters = dict(model.named_parameters())
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.groups: list[dict[str, Any]] = []
        self._side = side
        self.computes: LossFunction = side.loss_fn
        self.comm_hook = side.comm_hook(world)
        self.local_hooks = local_hooks(side.gradient_hooks, model)
        self.scaler = side.scaler or GradScaler(enabled=False)
        self._skipped = 0

    def start(self, micro_batches: Sequence[Batch]) -> None:
        """Begin a step: forget the last one and fingerprint the examples."""
        self.local: Arrays = {}
        self.reduced: Arrays = {}
        self._full: dict[str, Arrays] = {}
        self._norms: Arrays = {}
        self._projections: Arrays = {}
        self._large_before: dict[str, Tensor] = {}
        self.scale = self.scaler.get_scale()
        self._before: Arrays = {}
        self._losses: list[Sums] = []
        in_total = self._side.facts.loss_normalization == "global"
        self._total = float(global_count(micro_batches, self.world, self._side.count_fn)) if in_total else None
        examples = map(examples_of, micro_batches)
        self._samples = fingerprints([{name: to_numpy(x) for name, x in batch.items()} for batch in examples])

    def loss_fn(self, model: nn.Module, batch: Batch) -> Sums:
        """Compute the loss and record it."""
        sums = self.computes(model, batch)
        self._losses.append({name: value.detach() for name, value in sums.items()})
        return sums

    def before_update(self, optimizer: "HasState") -> None:
        """Record parameters, clipped gradients and parameter groups before the optimizer's step; rank 0 only."""
        if self.world.rank > 0:
            return
        self.note_before()
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        self._clipped = self._taken("clipped_gradients", gradients)
        self._keep_full("clipped_gradients", gradients)
        self.note_groups(optimizer.param_groups)

    def note_before(self) -> None:
        """Note the parameters before an update, large ones as excerpts and, for the projections, in full."""
        self._before = {name: to_numpy(excerpt_of(p)) for name, p in self.parameters.items()}
        if self.world.rank == 0:
            self._large_before = {name: p.detach().clone() for name, p in self.parameters.items() if is_large(p)}

    def note_groups(self, param_groups: Iterable[dict[str, Any]]) -> None:
        """Note the options of parameter groups."""
        self.groups = [_plain(group, self.names) for group in param_groups]

    def local_bucket(self, names: Sequence[str], bucket: dist.GradBucket) -> None:
        """Record a bucket's gradients before the all-reduce."""
        self.local |= self._taken("local_gradients", self._unscaled(names, bucket))

    def reduced_bucket(self, names: Sequence[str], bucket: dist.GradBucket) -> None:
        """Record a bucket's gradients after the all-reduce."""
        gradients = self._unscaled(names, bucket)
        self.reduced |= self._taken("gradients", gradients)
        if self._side.facts.clips_inside:
            self._keep_full("gradients", {name: x.clone() for name, x in gradients.items()})

    def _unscaled(self, names: Sequence[str], bucket: dist.GradBucket) -> dict[str, Tensor]:
        pairs = zip(names, bucket.gradients(), strict=True)
        return {name: value if self.scale == 1.0 else value / self.scale for name, value in pairs}

    def _taken(self, stage: str, tensors: Mapping[str, Tensor]) -> Arrays:
        """Return the excerpts of tensors, and record norms and projections of the large ones."""
        large = {name: tensor.detach() for name, tensor in tensors.items() if is_large(tensor)}
        self._norms |= {f"{stage}:{name}": to_numpy(torch.linalg.vector_norm(x)) for name, x in large.items()}
        self._projections |= _projected(stage, large.items())
        return {name: to_numpy(excerpt_of(tensor)) for name, tensor in tensors.items()}

    def _keep_full(self, stage: str, tensors: Mapping[str, Tensor]) -> None:
        large = {name: x.detach().cpu().numpy() for name, x in tensors.items() if is_large(x)}
        if self._keeps_full and large:
            self._full.setdefault(stage, {}).update(large)

    def full(self, params: bool) -> dict[str, Arrays]:
        """Return the large tensors kept in full, with the parameters if `params`; they share the model's memory."""
        self._keep_full("params", self.parameters if params else {})
        return self._full

    def record(self, optimizer: "HasState", averaged: AveragedModel | None = None) -> Record:
        """Return the record of the step that has just been taken; shared stages on rank 0 only."""
        state = self.model.state_dict()
        compared = dict(self.model.named_buffers()).keys() - set(self._side.facts.no_twin)
        buffers = {name: to_numpy(value) for name, value in state.items() if name in compared}
        params = {name: to_numpy(excerpt_of(parameter)) for name, parameter in self.parameters.items()}
        mine = {
            "samples": self._samples,
            "local_loss": self._local_losses(),
            **({"local_gradients": self.local} if self.local else {}),
            "local_norms": {name: x for name, x in self._norms.items() if name.startswith("local_")},
            "local_projections": {name: x for name, x in self._projections.items() if name.startswith("local_")},
            "local_buffers": buffers,
            **({"local_params": params} if self._side.own_parameters else {}),
        }
        if self.world.rank > 0:
            return mine
        if not self._before:  # the loss scaler skipped the update
            self._skipped += 1
            self.before_update(optimizer)
        kept = {} if averaged is None else {n: to_numpy(excerpt_of(p)) for n, p in averaged.module.named_parameters()}
        return {
            **mine,
            **({"averaged": kept} if kept else {}),
            **({"scaler": self._of_scaler()} if self.scaler.is_enabled() else {}),
            "norms": {name: x for name, x in self._norms.items() if not name.startswith("local_")},
            "projections": {name: x for name, x in self._projections.items() if not name.startswith("local_")},
            "optimizer_projections": {
                **_projected("update", self._large_updates()),
                **_projected("optimizer_state", self._states(optimizer).items()),
            },
            "gradients": self.reduced,
            "clipped_gradients": self._clipped,
            "update": {name: params[name] - before for name, before in self._before.items()},
            "params": params,
            "buffers": buffers,
            "optimizer_state": {name: to_numpy(excerpt_of(x)) for name, x in self._states(optimizer).items()},
        }

    def _large_updates(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the updates of large parameters, and free what they are taken from."""
        while self._large_before:
            name, before = self._large_before.popitem()
            yield name, before.neg_().add_(self.parameters[name].detach())

    def _states(self, optimizer: "HasState") -> dict[str, Tensor]:
        state = optimizer.state
        return {
            f"{key}:{name}": value
            for name, parameter in self.parameters.items()
            for key, value in state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.shape == parameter.shape
        }

    def _of_scaler(self) -> Arrays:
        state = self.scaler.state_dict()
        values = {"loss_scale": state["scale"], "growth_tracker": state["_growth_tracker"], "skipped": self._skipped}
        return {name: np.asarray(value) for name, value in values.items()}

    def _local_losses(self) -> Arrays:
        if self._total is not None:
            total = sum(float(s["loss"]) for s in self._losses) * self.world.world_size / self._total
            return {"loss": np.asarray(total)}
        return {"loss": np.asarray(np.mean([float(s["loss"] / s["count"]) for s in self._losses]))}


def recording_hook(recorder: RankRecorder, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Run the side's communication hook; record the gradients before and after it."""
    recorder.local_hooks(bucket)
    names = [recorder.names[id(parameter)] for parameter in bucket.parameters()]
    recorder.local_bucket(names, bucket)

    def keep(future: torch.futures.Future[Tensor]) -> Tensor:
        recorder.reduced_bucket(names, bucket)
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


def is_large(tensor: Tensor) -> bool:
    """Return whether a record holds an excerpt of a tensor."""
    return distance(tuple(tensor.shape)) > 1


def excerpt_of(tensor: Tensor) -> Tensor:
    """Return the excerpt of a tensor, like `jaxddp.parity.excerpts.excerpt`; a small tensor as it is."""
    apart = distance(tuple(tensor.shape))
    return tensor if apart == 1 else tensor.detach().reshape(-1)[::apart].reshape(-1, *(1,) * (tensor.ndim - 1))


def _projected(stage: str, tensors: Iterable[tuple[str, Tensor]]) -> Arrays:
    """Return "stage:name" -> projections of each large tensor."""
    large = ((name, x.detach().to_dense()) for name, x in tensors if is_large(x) and x.is_floating_point())
    return {f"{stage}:{name}": to_numpy(projections(x, None, torch, partial(_like, x))) for name, x in large}


def _like(tensor: Tensor, array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).to(tensor)


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Copy a tensor into a NumPy array; a sparse one is made dense."""
    return tensor.detach().to_dense().clone().cpu().numpy()
