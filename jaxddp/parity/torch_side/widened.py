"""Lift casts in a loss, for a run in float64; see `jaxddp.parity.jax_side.widened`. Imports no jax."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from jaxddp.parity.operations import SourceLine, calling_lines, line_of_user
from jaxddp.parity.port import Port, PortSource
from jaxddp.parity.processes import Tell
from torch_ref.distributed import World
from torch_ref.program import default_dtype

CASTS = {Tensor.float: torch.float32, Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16}
CONSTANTS = (torch.float32, torch.float64, torch.complex64, torch.complex128)


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


@dataclass(frozen=True)
class WideSource:
    """A source of a port whose torch model is made in float64, constants that it computes included.

    Attributes:
        source: makes the port.
    """

    source: PortSource

    @property
    def name(self) -> str:
        """Name of the port."""
        return self.source.name

    def port(self) -> Port:
        """Make the port."""
        port = self.source.port()
        return replace(port, torch_model=partial(_made_in, "float64", port.torch_model))


@dataclass(frozen=True)
class NarrowConstants:
    """A job that finds constants of the torch model that have other values if it is made in float64.

    Attributes:
        source: makes the port.
        world_size: always 1.
    """

    source: PortSource
    world_size: int = 1

    def run(self, world: World, tell: Tell) -> dict[str, SourceLine | None]:
        """Return their names, each with the user's line that registers it, if one does."""
        tell("torch_model")
        lines: dict[int, SourceLine | None] = {}
        register = nn.Module.register_buffer

        def noted(module: nn.Module, name: str, tensor: Any, *args: Any, **kwargs: Any) -> None:
            lines[id(tensor)] = line_of_user(calling_lines())
            register(module, name, tensor, *args, **kwargs)

        make = self.source.port().torch_model
        with mock.patch.object(nn.Module, "register_buffer", noted):
            narrow, wide = (dict(_constants(_made_in(dtype, make))) for dtype in ("float32", "float64"))
        both = ((name, x, wide[name]) for name, x in narrow.items() if name in wide)
        return {
            name: lines.get(id(x)) for name, x, y in both if x.shape == y.shape and not torch.equal(x.to(y.dtype), y)
        }


def _made_in(dtype: str, make: Callable[[], Any]) -> Any:
    with default_dtype(dtype):
        if dtype == "float32":
            return make()
        with InFloat64():
            return make()


def _constants(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the real and complex tensors of a model that are no parameters, as buffers or plain attributes."""
    for prefix, module in model.named_modules():
        for name, x in (vars(module) | module._buffers).items():
            if isinstance(x, Tensor) and x.dtype in CONSTANTS:
                yield f"{prefix}.{name}".lstrip("."), x
