"""Parameters whose gradients pass through a kink: rounding that moves a value across it makes them jump."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

# Nodes of torch's autograd graph whose derivative is not continuous.
KINK = re.compile(
    r"(\w*Relu|PreluKernel|RreluWithNoise|Elu|Hard\w+|Threshold|Softshrink|Abs|Clamp\w*|\w*Max|\w*MaxPool\w+|Maximum"
    r"|Min|Minimum|A(max|min|minmax)|Topk|Sort|Median|Kthvalue|Cum(max|min)|Multi\w*Margin\w*)Backward\d+"
)
PLAIN = re.compile(r"\w+Backward\d+")  # any other node of torch's own; functions in Python have no number
WRAPPERS = ("_DDPSinkBackward", "BackwardHookFunctionBackward")  # of DDP's outputs and of hooks: the identity


def behind_kinks(loss: Any, parameters: Mapping[str, Tensor]) -> list[str] | None:
    """Return the parameters that the loss depends on through a ReLU, a maximum or another kink.

    Args:
        loss: the loss, before or after its backward pass.
        parameters: the model's.

    Returns:
        Names in the order of `parameters`; None if the graph is not known: the loss is a number, or a compiled or
        checkpointed part of the model is a single node of it.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.ReLU(), torch.nn.Linear(2, 1))
    >>> behind_kinks(model(torch.ones(3, 2)).mean(), dict(model.named_parameters()))
    ['0.weight']
    """
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        return None
    left: list[tuple[Any, bool]] = [(loss.grad_fn, False)]
    seen, found = set[tuple[Any, bool]](), set[int]()
    while left:
        node, behind = left.pop()
        if (node, behind) in seen or (node, True) in seen:
            continue
        name = node.name().rpartition("::")[2]
        if name == "AccumulateGrad":
            found |= {id(node.variable)} if behind else set()
            continue
        if name not in WRAPPERS and not PLAIN.fullmatch(name):
            return None
        seen.add((node, behind))
        behind = behind or KINK.fullmatch(name) is not None
        left += [(after, behind) for after, _ in node.next_functions if after is not None]
    return [name for name, parameter in parameters.items() if id(parameter) in found]
