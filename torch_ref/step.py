"""Optimizer step of one replica: the code of a DDP user from zero_grad to scheduler.step.

local loss and gradients -> accumulation -> mean over the replicas -> clipping -> update
"""

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from jaxddp.tracking.gradient_metrics import EXAMPLE, EXAMPLES, TOTAL_NORM, by_group
from torch_ref.data_parallel import ManualDataParallel, average_buffers, bare, no_sync
from torch_ref.distributed import World
from torch_ref.dropout import Place, move_to
from torch_ref.gradient_hooks import GradientHook, mean_hooks
from torch_ref.gradient_log import GradientLog
from torch_ref.losses import Batch, CountFunction, LossFunction, Sums, count_labels, cross_entropy


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    micro_batches: Sequence[Batch],
    world: World,
    *,
    loss_normalization: str = "ddp",
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    buffers: str = "rank0",
    gradient_hooks: Sequence[GradientHook] = (),
    scaler: GradScaler | None = None,
    gradient_log: GradientLog | None = None,
    log_steps: bool = False,
    loss_fn: LossFunction = cross_entropy,
    count_fn: CountFunction = count_labels,
    step: int = 0,
) -> Sums:
    """Make one optimizer step; each `parameter.grad` afterwards is the gradient that the optimizer applied.

    All ranks must call it with equally many micro-batches; within DDP's `join` a rank may stop calling it.

    Args:
        model: the replica, in training mode: a `DistributedDataParallel` with the caller's comm hook, a
            `ManualDataParallel`, or any module if there is one replica.
        optimizer, scheduler: optimizer of the model's parameters and its scheduler, if any.
        micro_batches: this rank's examples of the step, in pieces that fit into memory.
        world: the ranks that train together.
        loss_normalization, loss_fn, count_fn, step: see `accumulate_gradients`.
        clip_grad_norm: largest global norm of the averaged gradient; None: no clipping.
        clip_grad_value: largest absolute value of its elements; None: no clipping.
        buffers: with "mean", buffers are averaged over the ranks after the step.
        gradient_hooks: hooks to apply to mean gradients; DDP applies "local" hooks, see
            `torch_ref.comm_hooks.register`.
        scaler: loss scaler, which skips the steps of optimizer and scheduler if a gradient overflows.
        gradient_log: adds its metrics to the sums.
        log_steps: add the norm of the mean gradient before clipping and the learning rates.

    Returns:
        This rank's sums over all micro-batches: "loss", "count" and the loss function's metrics; with a scaler
        also "scale", with which the gradients were computed, and "skipped", 1 or 0.

    >>> from jaxddp.config import TrainerConfig
    >>> from torch_ref import optim
    >>> model = nn.Linear(1, 2)
    >>> optimizer, scheduler = optim.from_config(model.parameters(), TrainerConfig(), total_steps=1)
    >>> batch = {"x": torch.tensor([[-1.0], [1.0]]), "y": torch.tensor([0, 1])}
    >>> train_step(model, optimizer, scheduler, [batch], World())["count"]
    tensor(2)
    """
    scaler = scaler or GradScaler(enabled=False)
    optimizer.zero_grad()
    sums = accumulate_gradients(model, micro_batches, world, loss_normalization, loss_fn, count_fn, step, scaler)
    scaler.unscale_(optimizer)
    mean_hooks(gradient_hooks, bare(model))
    if gradient_log is not None:
        sums |= gradient_log.sums(sums.pop(EXAMPLE, None))
    if log_steps:
        sums |= _of_step(model, optimizer, sums["loss"])
    if clip_grad_norm is not None:
        clip_grad_norm_(model.parameters(), clip_grad_norm)
    if clip_grad_value is not None:
        clip_grad_value_(model.parameters(), clip_grad_value)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    skipped = scaler.get_scale() < scale
    if buffers == "mean":
        average_buffers(model, world)
    if scheduler is not None and not skipped and not isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step()
    if not scaler.is_enabled():
        return sums
    return {**sums, "scale": sums["loss"].new_tensor(scale), "skipped": sums["loss"].new_tensor(skipped)}


def _of_step(model: nn.Module, optimizer: Optimizer, like: Tensor) -> Sums:
    """Return the norm of all gradients, and the learning rate of each of the optimizer's groups."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    rates = by_group([torch.full_like(like, float(group["lr"])) for group in optimizer.param_groups])
    return {TOTAL_NORM: get_total_norm(gradients), **rates}


def accumulate_gradients(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    world: World,
    loss_normalization: str = "ddp",
    loss_fn: LossFunction = cross_entropy,
    count_fn: CountFunction = count_labels,
    step: int = 0,
    scaler: GradScaler | None = None,
) -> Sums:
    """Accumulate the gradients of the step's loss, averaged over all replicas, in each `parameter.grad`.

    With replicas r = 1..W, micro-batches a = 1..A, per-element losses l and their number n, the loss is

        ddp:     (1/W) sum_r (1/A) sum_a (sum l_ra / n_ra)     mean of means, as in torch's DDP
        global:  sum_ra sum l_ra / sum_ra n_ra                 every element weighs the same

    A does not count empty micro-batches, and may differ between ranks.

    Args:
        model, micro_batches, world: see `train_step`.
        loss_normalization: "ddp" or "global".
        loss_fn: (model, micro-batch) -> sums over its elements, "loss" and "count" among them.
        count_fn: micro-batch -> the "count" that loss_fn will return; used by "global".
        step: number of optimizer steps before, on which the masks of `torch_ref.dropout.Dropout` depend.
        scaler: loss scaler; gradients are those of the scaled loss.

    Returns:
        This rank's sums over all micro-batches.

    Source: pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """
    total_count = global_count(micro_batches, world, count_fn) if loss_normalization == "global" else None
    totals: Sums = {}
    examples, nonempty = 0, sum(map(_has_examples, micro_batches))
    for number, batch in enumerate(micro_batches, start=1):
        # Only the last backward pass sends gradients; no_sync must cover the forward passes before it too.
        with contextlib.nullcontext() if number == len(micro_batches) else no_sync(model):
            move_to(model, Place(step, examples, world.rank, world.world_size))
            sums = loss_fn(model, batch) if _has_examples(batch) else _in_evaluation(loss_fn, model, batch)
            if not _has_examples(batch):
                loss = sums["loss"]  # 0; its backward pass takes part in the other ranks' all-reduce
            elif total_count is None:
                loss = sums["loss"] / sums["count"] / nonempty
            else:
                loss = sums["loss"] * world.world_size / total_count  # the mean over replicas divides by W
            loss = loss if scaler is None else scaler.scale(loss)
            loss.backward()
        if EXAMPLE in sums:  # the first of all micro-batches
            sums[EXAMPLE] = (examples + sums[EXAMPLE]) * (sums[EXAMPLE] > 0) * (totals.get(EXAMPLES, 0) == 0)
        for name, value in sums.items():
            totals[name] = totals.get(name, 0) + value.detach()
        examples += len(next(iter(batch.values())))
    if isinstance(model, ManualDataParallel):
        model.sync_gradients()
    return totals


def _has_examples(batch: Batch) -> bool:
    return all(map(len, batch.values()))


def _in_evaluation(loss_fn: LossFunction, model: nn.Module, batch: Batch) -> Sums:
    """Call `loss_fn` in evaluation mode, since BatchNorm cannot train on an empty batch."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    sums = loss_fn(model, batch)
    for module, mode in modes:
        module.training = mode
    return sums


def global_count(micro_batches: Sequence[Batch], world: World, count_fn: CountFunction = count_labels) -> Tensor:
    """Return the count of elements over all micro-batches of all replicas."""
    return world.all_reduce(torch.stack([count_fn(batch) for batch in micro_batches]).sum())
