"""Losses of a micro-batch as sums and counts, which the step divides."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jaxddp.config.choices import IGNORE_INDEX
from jaxddp.tracking.gradient_metrics import EXAMPLE, EXAMPLES

Batch = Mapping[str, Tensor]
Sums = dict[str, Tensor]

LossFunction = Callable[[nn.Module, Batch], Sums]
CountFunction = Callable[[Batch], Tensor]


def cross_entropy(model: nn.Module, batch: Batch, label_smoothing: float = 0.0, detect_anomaly: bool = False) -> Sums:
    """Sum the cross entropy -log softmax(model(x))_y over the labels y, and the accuracy of the largest logit.

    Labels of -100 are ignored, as by `F.cross_entropy`, which returns loss / count.

    Args:
        model: maps x to logits (B, C) or (B, T, C).
        batch: "x", and integer labels "y" (B,) or (B, T).
        label_smoothing: share of a label that is spread over all classes.
        detect_anomaly: add what `example_anomaly` returns.

    Returns:
        Scalar sums: "loss", which is differentiable, "count" and "accuracy".

    >>> batch = {"x": torch.tensor([[0.5, 0.5], [0.1, 0.9]]).log(), "y": torch.tensor([0, -100])}
    >>> {name: round(value.item(), 4) for name, value in cross_entropy(nn.Identity(), batch).items()}
    {'loss': 0.6931, 'count': 1, 'accuracy': 1}
    """
    logits = model(batch["x"]).flatten(0, -2)
    labels = batch["y"].flatten()
    entropy = partial(F.cross_entropy, logits, labels, ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing)
    right = (logits.argmax(-1) == labels).sum()
    sums = {"loss": entropy(reduction="sum"), "count": count_labels(batch), "accuracy": right}
    return sums | (example_anomaly(entropy(reduction="none").view_as(batch["y"])) if detect_anomaly else {})


def example_anomaly(losses: Tensor) -> Sums:
    """Count the examples, (B, ...), whose loss is not finite, and return 1 + the place of the first; 0: none.

    >>> example_anomaly(torch.tensor([1.0, torch.inf, torch.nan]))
    {'anomaly_examples': tensor(2), 'anomaly_example': tensor(2)}
    """
    wrong = ~losses.isfinite().reshape(len(losses), -1).all(1)
    return {EXAMPLES: wrong.sum(), EXAMPLE: torch.where(wrong.any(), wrong.int().argmax() + 1, 0)}


def count_labels(batch: Batch) -> Tensor:
    """Count the labels other than -100, which needs no forward pass.

    >>> count_labels({"y": torch.tensor([[3, -100], [0, 1]])})
    tensor(3)
    """
    return (batch["y"] != IGNORE_INDEX).sum()
