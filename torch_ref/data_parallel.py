"""Data-parallel models, by torch's DistributedDataParallel or by hand."""

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torch_ref.distributed import World
from torch_ref.dropout import Dropout
from torch_ref.losses import Batch, LossFunction, Sums
from torch_ref.verify import verify_replicas

# Operations whose results a rematerialized forward pass keeps, because they take long to compute again.
_ATEN = torch.ops.aten
PRODUCTS = [_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default, _ATEN.convolution.default]


def wrap(
    module: nn.Module, world: World, strategy: str = "ddp", buffers: str = "rank0", find_unused_parameters: bool = False
) -> nn.Module:
    """Wrap a module as one of the replicas.

    Args:
        module: module on the world's device, equal on all ranks.
        world: the ranks that train together.
        strategy: "ddp", "manual", or "single", which returns the module unchanged.
        buffers: "rank0": rank 0's buffers are sent to all ranks before a forward pass; otherwise they stay
            separate, and with "mean" `train_step` averages them.

    Raises:
        TrainingError: the ranks start from different parameters (DDP itself would overwrite them).
    """
    if strategy == "single":
        return module
    if strategy == "manual":
        return ManualDataParallel(module, world, buffers)
    verify_replicas(bare(module), world, step=0)
    # The gradient of a convolution with one input channel may have other strides; that costs a copy only.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    device_ids = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(
        module,
        device_ids=device_ids,
        process_group=world.group,
        find_unused_parameters=find_unused_parameters,
        **buffers_option(buffers),
    )


def buffers_option(buffers: str) -> dict[str, Any]:
    """Return DDP's keyword argument for the buffers; torch 2.13 renamed it.

    >>> buffers_option("rank0"), list(buffers_option("local").values())
    ({}, [False])
    """
    known = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {} if buffers == "rank0" else {name: False}


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which backward passes accumulate local gradients and send nothing."""
    if isinstance(model, DistributedDataParallel | ManualDataParallel):
        return model.no_sync()
    return contextlib.nullcontext()


def bare(model: nn.Module) -> nn.Module:
    """Return the module inside a wrapped or bare model."""
    inner = model.module if isinstance(model, DistributedDataParallel | ManualDataParallel) else model
    return inner.model if isinstance(inner, WithLoss) else inner


class WithLoss(nn.Module):
    """A module whose forward pass is its loss, so that the loss may call any method of the module within DDP.

    Args:
        model, loss_fn: the module, and the loss as a function of it and of a batch.
        remat: keep only the results of products and convolutions for the backward pass, see `recomputed`.

    >>> from torch_ref.losses import cross_entropy
    >>> WithLoss(nn.Identity(), cross_entropy)({"x": torch.zeros(1, 2), "y": torch.tensor([0])})["accuracy"]
    tensor(1)
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, remat: bool = False):
        super().__init__()
        self.model, self._loss_fn, self._remat = model, loss_fn, remat

    def forward(self, batch: Batch) -> Sums:
        """Compute the loss."""
        if not (self._remat and torch.is_grad_enabled()):
            return self._loss_fn(self.model, batch)
        return recomputed(self.model, self._loss_fn, batch)


def recomputed(model: nn.Module, loss_fn: LossFunction, batch: Batch) -> Sums:
    """Compute a loss whose backward pass computes all intermediate results but `PRODUCTS` again.

    The second forward pass starts from the buffers and draws of the first, and its changes of buffers are undone.

    Source: torch.utils.checkpoint
    """
    before = [buffer.clone() for buffer in model.buffers()]
    layers = [layer for layer in model.modules() if isinstance(layer, Dropout)]
    places = [(layer._place, layer._calls) for layer in layers]
    passes = 0

    def forward() -> Sums:
        nonlocal passes
        passes += 1
        if passes == 1:
            return loss_fn(model, batch)
        after = [buffer.clone() for buffer in model.buffers()]
        _set(model, before)
        for layer, (place, calls) in zip(layers, places, strict=True):
            layer.move_to(place)
            layer._calls = calls
        try:
            return loss_fn(model, batch)
        finally:
            _set(model, after)

    context = partial(create_selective_checkpoint_contexts, PRODUCTS)
    result: Sums = checkpoint(forward, use_reentrant=False, context_fn=context)
    return result


def _set(model: nn.Module, values: list[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), values, strict=True):
            buffer.copy_(value)


def loss_within(model: nn.Module, batch: Batch) -> Sums:
    """Compute the loss of a wrapped `WithLoss`, as a loss function of its wrapper."""
    result: Sums = model(batch)
    return result


class ManualDataParallel(nn.Module):
    """Data parallelism by hand: gradients are averaged after the backward pass, g = (g_1 + ... + g_W) / W.

    Call `sync_gradients` after the last backward pass of a step, and wrap the other passes in `no_sync`, as with
    DistributedDataParallel. Rank 0's buffers are sent to the others before the first forward pass of each step, as
    in DistributedDataParallel.

    Args:
        module: module, equal on all ranks.
        world: the ranks that train together.
        buffers: see `wrap`.

    Raises:
        TrainingError: the ranks start from different parameters.

    >>> model = ManualDataParallel(nn.Linear(2, 1), World())
    >>> model(torch.ones(4, 2)).sum().backward()
    >>> model.sync_gradients()
    >>> model.module.weight.grad
    tensor([[4., 4.]])
    """

    def __init__(self, module: nn.Module, world: World, buffers: str = "rank0"):
        super().__init__()
        self.module = module
        self._world = world
        self._sync = True
        self._sends_buffers = buffers == "rank0"
        self._buffers_differ = self._sends_buffers  # forward passes change them differently on each rank
        verify_replicas(bare(module), world, step=0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._buffers_differ:
            broadcast_buffers(self.module, self._world)
            self._buffers_differ = False
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Disable `sync_gradients` in this context, so that gradients accumulate locally."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def sync_gradients(self) -> None:
        """Replace each gradient by its mean over the replicas."""
        if not self._sync:
            return
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                self._world.all_reduce(parameter.grad)
                parameter.grad /= self._world.world_size
        self._buffers_differ = self._sends_buffers


def average_buffers(module: nn.Module, world: World) -> None:
    """Average the floating-point buffers over the ranks, in place."""
    for buffer in module.buffers():
        if buffer.is_floating_point():
            world.all_reduce(buffer, "mean")


def broadcast_buffers(module: nn.Module, world: World) -> None:
    """Send rank 0's buffers, such as BatchNorm's running statistics, to all ranks."""
    for buffer in module.buffers():
        world.broadcast(buffer)
