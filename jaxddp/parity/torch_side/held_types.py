"""Types of numbers that a port's torch half holds when it trains as written. Imports no jax."""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from jaxddp.parity.held_types import HeldType, HeldTypes, version_of
from jaxddp.parity.operations import SourceLine, is_of_user
from jaxddp.parity.port import Port
from jaxddp.parity.torch_side.made_lines import Made, lines_of_layers, noted
from jaxddp.parity.torch_side.side import default_dtype, to_batch
from jaxddp.parity.user_code.homes import line_of_function
from jaxddp.program.losses import named_losses
from torch_ref.ddp_methods import ddp_methods
from torch_ref.program import MakeOptimizer, optimizer_of

# torch.get_float32_matmul_precision -> products of float32 matrices on hardware with a choice
PRODUCTS = {"high": "TensorFloat32", "medium": "bfloat16"}
KINDS_OF_TENSORS = {"DoubleTensor": "float64", "HalfTensor": "float16", "BFloat16Tensor": "bfloat16"}


@dataclass
class Defaults:
    """What a port sets for all of torch: the default dtype, and the precision of products of float32 matrices."""

    dtype: str = "float32"
    products: str = ""


_of_ports: dict[tuple[str, int], Defaults] = {}  # see `version_of`


@contextmanager
def own_defaults(port: str) -> Iterator[Defaults]:
    """Note what a port sets for all of torch, and keep it from this process, which runs others too.

    Args:
        port: name of the port, whose file is loaded in this context.
    """
    own = _of_ports.setdefault(version_of(port), Defaults())
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")

    def noting(function: Callable[[Any], None]) -> Callable[[Any], None]:
        def note(choice: Any) -> None:
            if not is_of_user(sys._getframe(1).f_code.co_filename):
                function(choice)
            elif isinstance(choice, torch.dtype):
                own.dtype = _name_of(choice)
            else:
                own.dtype = KINDS_OF_TENSORS.get(getattr(choice, "__name__", choice).rpartition(".")[2], "float32")

        return note

    try:
        with ExitStack() as stack:
            for name in ("set_default_dtype", "set_default_tensor_type"):
                stack.enter_context(mock.patch.object(torch, name, noting(getattr(torch, name))))
            yield own
        own.products = PRODUCTS.get(torch.get_float32_matmul_precision(), own.products)
    finally:
        torch.set_float32_matmul_precision(precision)


def held_types(port: Port, own: Defaults, computes: bool) -> HeldTypes:
    """Return the types of a port's model, of its optimizers' states after one step, and of its loss.

    They are taken from tensors without memory, which takes a tenth of the time.

    Args:
        port: the port.
        own: what it sets for all of torch.
        computes: whether to compute with numbers where it takes them, unless the model is large.
    """
    with default_dtype(own.dtype), torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        types = _held_on("meta", port, own)
        return _held_on("cpu", port, own) if types.left_out and computes else types


def _held_on(device: str, port: Port, own: Defaults) -> HeldTypes:
    types = HeldTypes(products=own.products)
    with (
        _autocasts() as casts,
        types.collecting("parameters", "buffers", "moments", "losses"),
        noted(Optimizer) as optimizers,
    ):
        with noted(nn.Module) as modules, torch.device(device):
            model = port.torch_model()
        types.of |= _of_model(model, modules, line_of_function(port.torch_model))
        batch = port.first_batch("torch")
        if port.batch is None:  # of a shared one, each side has what it makes of it
            types.of["inputs"] = {name: HeldType(_input(x.dtype.name, own.dtype)) for name, x in batch.items()}
        tensors = {name: x.to(device) for name, x in to_batch(batch, own.dtype).items()}
        with types.collecting("losses"), torch.device(device), _Doubles(types):
            types.of["losses"] = _of_losses(port, model, tensors)
        with types.collecting("moments"):
            types.of["moments"] = _of_optimizers(port, model, optimizers)
    types.casts = tuple(sorted(casts))
    return types


def _of_model(model: nn.Module, made: list[Made], home: SourceLine | None) -> dict[str, dict[str, HeldType]]:
    """Return the types of parameters and buffers; `home` is the line of those that no layer of a library makes."""
    lines = lines_of_layers(model, made)

    def of(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, HeldType]:
        return {name: HeldType(_name_of(x.dtype), lines.get(name.rpartition(".")[0], home)) for name, x in tensors}

    everything = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    return dict(zip(("parameters", "buffers"), map(of, everything), strict=True))


def _of_losses(port: Port, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, HeldType]:
    """Return the types of the loss, or of those of a `torch_step`, which takes the first step of its optimizers."""
    if port.torch_step is not None and port.configure_optimizers is not None:
        ddp_methods(model)
        step = port.torch_step(model, port.configure_optimizers(model), batch)
        losses, line = named_losses("torch_step", step), line_of_function(port.torch_step)
    else:
        returned, line = port.torch_loss(model, batch), line_of_function(port.torch_loss)
        losses = {"loss": returned[0] if isinstance(returned, tuple) else returned}
    return {name: HeldType(_name_of(x.dtype), line) for name, x in losses.items() if isinstance(x, Tensor)}


def _of_optimizers(port: Port, model: nn.Module, optimizers: list[Made]) -> dict[str, HeldType]:
    """Return the types of the optimizers' states, after a step on made gradients unless they have taken one."""
    if port.optimizer_config is not None:  # the trainers' own, whose states are in the parameters' types
        return {}
    if port.torch_step is None:
        make = MakeOptimizer(port.torch_optimizer, None, port.configure_optimizers)
        optimizer, _ = optimizer_of(make, model, list(model.parameters()))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        optimizer.step()
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{key}:{names[parameter]}": HeldType(_name_of(value.dtype), line)
        for optimizer, line in optimizers
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if parameter in names and isinstance(value, Tensor) and value.shape == parameter.shape
    }


class _Doubles(TorchDispatchMode):
    """Notes whether a program asks for float64 by name; an array of NumPy's comes in it."""

    def __init__(self, types: HeldTypes):
        super().__init__()
        self._types = types

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in args if isinstance(x, Tensor)]
        if (kwargs or {}).get("dtype") == torch.float64 and not any(x.dtype == torch.float64 for x in given):
            self._types.doubles = True
        return function(*args, **kwargs or {})


@contextmanager
def _autocasts() -> Iterator[set[str]]:
    """Note the dtypes to which autocast contexts cast, those for devices that this machine does not have included."""
    casts: set[str] = set()
    make: Any = torch.autocast.__init__

    @wraps(make)
    def note(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *more: Any, **options: Any) -> None:
        if enabled:
            casts.add(_name_of(dtype or torch.get_autocast_dtype(device_type)))
        make(self, device_type, dtype, enabled, *more, **options)

    with mock.patch.object(torch.autocast, "__init__", note):
        yield casts


def _input(dtype: str, default: str) -> str:
    """Return the type to which a loop casts an entry of the batch: NumPy's float64 is the default of both sides."""
    return default if dtype == "float64" else dtype


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
