"""Name the losses that a port's step returns. Imports neither framework."""

import math
from collections.abc import Mapping
from typing import Any

from jaxddp.errors import InputError


def named_losses(function: str, returned: Any) -> dict[str, Any]:
    """Return the losses of a step by name; a single one is called "loss".

    Args:
        function: the step's name, for messages.
        returned: a scalar, or a dictionary of scalars.

    Raises:
        InputError: a loss is not a scalar.

    >>> named_losses("torch_step", 2.0), named_losses("flax_step", {"actor": 1.0, "critic": 0.5})
    ({'loss': 2.0}, {'actor': 1.0, 'critic': 0.5})
    """
    losses = returned if isinstance(returned, Mapping) else {"loss": returned}
    for name, value in losses.items():
        shape = getattr(value, "shape", () if isinstance(value, int | float) else None)
        if shape is None or math.prod(shape) != 1:
            kind = type(value).__name__ if shape is None else f"an array {tuple(shape)}"
            raise InputError(f"{function}: must return its loss, or losses by name; {name} is {kind}")
    return dict(losses)
