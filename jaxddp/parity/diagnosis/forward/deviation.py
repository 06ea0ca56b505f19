"""Standard deviations and variances that divide by another number of values."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from jaxddp.parity.diagnosis.forward.calls import Call, Change, Proceed

MEASURES = {"std": "standard deviation", "var": "variance"}
NAMES = {name: name.removesuffix("_mean") for name in ("std", "var", "std_mean", "var_mean")}
DIVISORS: dict[float, str] = {0: "n", 1: "n - 1"}


def deviation(call: Call) -> Iterator[Change]:
    """Yield a standard deviation or a variance that divides by n instead of n - 1, or by n - 1 instead of n.

    With s the result, c the call's correction and d the other one, the change is

        variance: s (n - c) / (n - d);  standard deviation: s sqrt((n - c) / (n - d))

    Source: torch.std, correction 1 by default; jnp.std, ddof 0 by default.
    """
    if call.name not in NAMES or (used := _correction(call)) not in DIVISORS or _size(call, call.result) < 2:
        return
    kind, other = NAMES[call.name], 1 - used

    def answer(call: Call, proceed: Proceed, value: float, /) -> Any:
        result = proceed(call)
        n = _size(call, result)
        ratio = (n - used) / (n - other)
        factor = ratio**0.5 if NAMES[call.name] == "std" else ratio  # the call may be another one of the group
        return (factor * result[0], result[1]) if call.name.endswith("_mean") else factor * result

    instead = f"with divisor {DIVISORS[other]} instead of {DIVISORS[used]}"
    group = f"standard deviations and variances {instead}"
    yield Change("std_correction", f"{MEASURES[kind]} {instead}", answer, group=group)


def _correction(call: Call) -> float:
    """Return what the call subtracts from n: `correction`, or 1 or 0 for `unbiased`; 1 by default."""
    flags = [argument for argument in call.args[1:3] if isinstance(argument, bool)]
    unbiased = flags[0] if flags else call.kwargs.get("unbiased", True)
    correction = call.kwargs.get("correction")
    return float(unbiased) if correction is None else correction


def _size(call: Call, result: Any) -> int:
    """Return the number of values behind each element of the result."""
    values = call.args[0] if call.args else call.kwargs["input"]
    spread: Tensor = result[0] if isinstance(result, tuple) else result
    return values.numel() // max(spread.numel(), 1) if torch.is_floating_point(spread) else 0
