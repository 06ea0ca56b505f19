"""Losses, metrics and requests, as a program's functions return them. Imports neither framework."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxddp.config.choices import RESERVED
from jaxddp.errors import InputError


def named_losses(function: str, returned: Any) -> dict[str, Any]:
    """Return the losses of a step by name; a single one is called "loss".

    Args:
        function: the step's name, for messages.
        returned: a scalar, or a dictionary of scalars.

    Raises:
        InputError: a loss is not a scalar.

    >>> named_losses("torch_step", 2.0), named_losses("jax_step", {"actor": 1.0, "critic": 0.5})
    ({'loss': 2.0}, {'actor': 1.0, 'critic': 0.5})
    """
    losses = returned if isinstance(returned, Mapping) else {"loss": returned}
    for name, value in losses.items():
        shape = getattr(value, "shape", () if isinstance(value, int | float) else None)
        if shape is None or math.prod(shape) != 1:
            kind = type(value).__name__ if shape is None else f"an array {tuple(shape)}"
            raise InputError(f"{function}: must return its loss, or losses by name; {name} is {kind}")
    return dict(losses)


def asks_to_stop(function: str, returned: Any) -> bool:
    """Return whether what a callback, as `on_epoch_end`, returns ends the run.

    Raises:
        InputError: it is text other than "stop", or True; what a call at its end happens to return is ignored.
    """
    if returned is True or (isinstance(returned, str) and returned != "stop"):
        raise InputError(f'{function}: must return None, or "stop" to end the run, and returns {returned!r}')
    return isinstance(returned, str)


def shown_metrics(beside: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the numbers and arrays among what a loss function returns with its loss, which may be anything.

    >>> shown_metrics({"accuracy": 0.5, "loss": 2.0, "note": "text", 3: 1.0})
    {'accuracy': 0.5}
    """
    numbers = {name: x for name, x in beside.items() if hasattr(x, "shape") or isinstance(x, int | float)}
    return {name: x for name, x in numbers.items() if isinstance(name, str) and name not in RESERVED}


def named_metrics(function: str, returned: Any, size: int, to_array: Callable[[Any], Any]) -> dict[str, Any]:
    """Return metrics as arrays: means over a batch, or one value for each of its examples.

    Args:
        function: name of the function that returned them, for messages.
        returned: metrics by name.
        size: number of examples in the batch.
        to_array: makes a framework's array of a number, or of an array.

    Raises:
        InputError: it is no dictionary, a name is no text, or a value is of neither form.

    >>> import numpy as np
    >>> named_metrics("metrics", {"error": [0.5, 1.5, 1.0]}, 2, np.asarray)
    Traceback (most recent call last):
    jaxddp.errors.InputError: metrics: error: has shape (3,); must be a mean, or one value for each of the 2 examples
    """
    if not isinstance(returned, Mapping):
        raise InputError(f"{function}: must return a dictionary of metrics, and returns {type(returned).__name__}")
    arrays = {}
    for name, value in returned.items():
        if not isinstance(name, str):
            raise InputError(f"{function}: {name!r}: must be text, as the name of a metric")
        try:
            arrays[name] = to_array(value)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(f"{function}: {name}: must be numbers, and is {type(value).__name__}") from None
        if (shape := tuple(arrays[name].shape)) and shape[0] != size:
            must = f"must be a mean, or one value for each of the {size} examples"
            raise InputError(f"{function}: {name}: has shape {shape}; {must}")
    return arrays
