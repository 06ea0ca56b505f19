"""The loss of one micro-batch, as sums: what is divided, and by what, the step decides."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.nn import functional as F

from jaxddp.config.choices import IGNORE_INDEX

Batch = Mapping[str, Tensor]
Sums = dict[str, Tensor]

LossFunction = Callable[[nn.Module, Batch], Sums]
CountFunction = Callable[[Batch], Tensor]


def cross_entropy(model: nn.Module, batch: Batch) -> Sums:
    """Sums of -log softmax(model(x))_y over all labels y but those of -100, and how many are right.

    `loss / count` is `F.cross_entropy(logits, y)`.

    Args:
        model: maps x to logits (B, C) or (B, T, C).
        batch: "x", and "y" (B,) or (B, T), integer.

    Returns:
        Scalars: "loss", through which gradients flow, "count" and "accuracy".

    >>> import torch
    >>> batch = {"x": torch.tensor([[0.5, 0.5], [0.1, 0.9]]).log(), "y": torch.tensor([0, -100])}
    >>> {name: round(value.item(), 4) for name, value in cross_entropy(nn.Identity(), batch).items()}
    {'loss': 0.6931, 'count': 1, 'accuracy': 1}
    """
    logits = model(batch["x"]).flatten(0, -2)
    labels = batch["y"].flatten()
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return {"loss": loss, "count": count_labels(batch), "accuracy": (logits.argmax(-1) == labels).sum()}


def count_labels(batch: Batch) -> Tensor:
    """How many labels count; known before the forward pass, unlike the loss.

    >>> import torch
    >>> count_labels({"y": torch.tensor([[3, -100], [0, 1]])})
    tensor(3)
    """
    return (batch["y"] != IGNORE_INDEX).sum()
