"""Lift casts in a loss, for a run in float64; see `jaxddp.parity.jax_side.widened`. Imports no jax."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CASTS = {Tensor.float: torch.float32, Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16}


class InFloat64(TorchFunctionMode):
    """Context manager that turns casts to float32 and to 16 bits into casts to float64; autocast skips float64.

    Attributes:
        seen: names of the dtypes that were requested.

    >>> with InFloat64() as mode:
    ...     (torch.ones(1).double().half() / 3).dtype, torch.zeros(2, dtype=torch.float32).dtype
    (torch.float64, torch.float64)
    >>> sorted(mode.seen)
    ['float16', 'float32']
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch with float64 in place of narrower dtypes."""
        if torch.is_autocast_enabled("cpu"):
            self._see(torch.get_autocast_dtype("cpu"))
        if func in CASTS:
            self._see(CASTS[func])
            func = Tensor.double
        wide = {key: self._wide(value) for key, value in kwargs.items()} if kwargs else {}
        return func(*map(self._wide, args), **wide)

    def _wide(self, value: Any) -> Any:
        if isinstance(value, torch.dtype) and value in CASTS.values():
            self._see(value)
            return torch.float64
        return value

    def _see(self, dtype: torch.dtype) -> None:
        self.seen.add(str(dtype).removeprefix("torch."))
