"""Hooks on the gradients of chosen parameters, before or after their mean over the ranks.

local   g = mean_r h(g_r)       once per step, on the gradients that DDP is about to send
mean    g = h(mean_r g_r)       between backward pass and clipping
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch.distributed as dist
from torch import Tensor, nn

from jaxddp.config.choices import GRADIENT_STAGES
from jaxddp.errors import check_name


@dataclass(frozen=True)
class GradientHook:
    """A function to call with the gradients of some parameters.

    Attributes:
        pattern: pattern of parameter names, as in `fnmatch` ("encoder.*").
        function: (name, gradient) -> new gradient, or None to leave it unchanged.
        when: "local": on each rank, before gradients are sent; "mean": after their mean, before clipping.

    Raises:
        InputError: `when` has another value.
    """

    pattern: str
    function: Callable[[str, Tensor], Tensor | None]
    when: str = "mean"

    def __post_init__(self) -> None:
        check_name("GradientHook: when", self.when, GRADIENT_STAGES)


def apply_hooks(hooks: Sequence[GradientHook], when: str, gradients: Iterable[tuple[str, Tensor]]) -> None:
    """Apply the hooks of one stage, "local" or "mean", one after the other, and change gradients in place.

    >>> import torch
    >>> gradient = torch.tensor([3.0])
    >>> apply_hooks([GradientHook("fc.*", lambda name, g: g / 2)], "mean", [("fc.bias", gradient)])
    >>> gradient
    tensor([1.5000])
    """
    gradients = list(gradients)
    for hook in hooks:
        for name, gradient in gradients:
            if hook.when == when and fnmatchcase(name, hook.pattern):
                new = hook.function(name, gradient)
                if new is not None:
                    gradient.copy_(new)


def mean_hooks(hooks: Sequence[GradientHook], module: nn.Module) -> None:
    """Apply the hooks on mean gradients to those of a module's parameters."""
    apply_hooks(hooks, "mean", [(name, p.grad) for name, p in module.named_parameters() if p.grad is not None])


def local_hooks(hooks: Sequence[GradientHook], module: nn.Module) -> Callable[[dist.GradBucket], None]:
    """Return a function that applies the hooks on local gradients to a bucket that DDP is about to send."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}

    def of_bucket(bucket: dist.GradBucket) -> None:
        in_bucket = (names[id(parameter)] for parameter in bucket.parameters())
        apply_hooks(hooks, "local", zip(in_bucket, bucket.gradients(), strict=True))

    return of_bucket
