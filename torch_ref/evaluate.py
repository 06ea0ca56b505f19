"""Evaluation on all ranks, in which every example counts exactly once."""

from collections.abc import Iterable

import torch
from torch import nn

from torch_ref.data_parallel import broadcast_buffers
from torch_ref.distributed import World
from torch_ref.losses import Batch, LossFunction, cross_entropy
from torch_ref.metrics import all_reduce_sums, means


@torch.no_grad()
def evaluate(
    module: nn.Module, batches: Iterable[Batch], world: World, loss_fn: LossFunction = cross_entropy
) -> dict[str, float]:
    """Compute the means of loss and metrics over the examples of all ranks, in evaluation mode.

    All ranks evaluate the same model, with rank 0's buffers. Mode and buffers are restored afterwards.

    Args:
        module: the model, not wrapped, so that no forward pass waits for ranks that have fewer batches.
        batches: batches of this rank, at least one, which may be empty; all ranks together hold each example once.
        world: the ranks that train together.
        loss_fn: (model, batch) -> sums over its elements, "loss" and "count" among them.

    >>> batch = {"x": torch.tensor([[0.5, 0.5], [0.1, 0.9]]).log(), "y": torch.tensor([0, 1])}
    >>> evaluate(nn.Identity(), [batch, batch], World())["accuracy"]
    1.0
    """
    training = module.training
    module.eval()
    saved = [buffer.clone() for buffer in module.buffers()]
    broadcast_buffers(module, world)
    of_batches = [loss_fn(module, batch) for batch in batches]
    sums = {name: torch.stack([of_batch[name].double() for of_batch in of_batches]).sum() for name in of_batches[0]}
    for buffer, before in zip(module.buffers(), saved, strict=True):
        buffer.copy_(before)
    module.train(training)
    return means(all_reduce_sums([sums], world)[0])
