"""Parameters of torch's functions, by name."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch.overrides import get_testing_overrides

_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# What torch does not tell, or tells in part.
_LSTM = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "training", "bidirectional", "batch_first")
_UNTOLD: dict[str, dict[str, Any]] = {
    "scaled_dot_product_attention": {
        **dict.fromkeys(("query", "key", "value"), inspect.Parameter.empty),
        **{"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False},
    },
    **{name: dict.fromkeys(_LSTM, inspect.Parameter.empty) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}


def parameters_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the parameters of a function of torch, in order, with their defaults.

    Source: the function's signature, or the one that torch tests overrides with.

    >>> import torch
    >>> parameters_of(torch.nn.functional.leaky_relu)["negative_slope"]
    0.01
    >>> [*parameters_of(torch.softmax)]
    ['input', 'dim', 'dtype']
    """
    try:
        return _parameters_of(function)
    except TypeError:  # it cannot be hashed
        return {}


@cache
def _parameters_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    if (untold := _UNTOLD.get(getattr(function, "__name__", ""))) is not None:
        return untold
    for source in (function, get_testing_overrides().get(function)):
        try:
            parameters = inspect.signature(source).parameters.values()  # type: ignore[arg-type]
        except (TypeError, ValueError):
            continue
        told = {one.name: one.default for one in parameters if one.kind in _KINDS}
        if told and "self" not in told:
            return told
    return {}
