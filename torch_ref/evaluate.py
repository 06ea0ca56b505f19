"""Evaluation on all ranks that counts every example exactly once."""

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
    """Means of loss and metrics over all ranks' examples, in the model's evaluation mode.

    Every rank evaluates the same model: it is given rank 0's buffers meanwhile.

    Args:
        module: not wrapped, so that no forward pass waits for the other ranks: they may have
            fewer batches. Its mode is restored.
        batches: this rank's share, at least one, which may be empty; the shares together hold each example once.

    >>> batch = {"x": torch.tensor([[0.5, 0.5], [0.1, 0.9]]).log(), "y": torch.tensor([0, 1])}
    >>> evaluate(nn.Identity(), [batch, batch], World())["accuracy"]
    1.0
    """
    training = module.training
    module.eval()
    own = [buffer.clone() for buffer in module.buffers()]
    broadcast_buffers(module, world)
    every = [loss_fn(module, batch) for batch in batches]
    sums = {name: torch.stack([of_batch[name].double() for of_batch in every]).sum() for name in every[0]}
    for buffer, before in zip(module.buffers(), own, strict=True):
        buffer.copy_(before)
    module.train(training)
    return means(all_reduce_sums([sums], world)[0])
