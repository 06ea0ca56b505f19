"""Make the optimizer and scheduler of a port. Imports no jax."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from jaxddp.errors import InputError
from jaxddp.parity.port import Port

Made = tuple[Optimizer, Any]


def optimizer_of_port(port: Port, model: nn.Module, parameters: list[nn.Parameter]) -> Made:
    """Make the optimizer of a port, and its scheduler or None.

    Args:
        port: has `torch_optimizer`, with `torch_scheduler` or without, or `configure_optimizers`.
        model: the module.
        parameters: its parameters.

    Raises:
        InputError: a function takes or returns something other than `Port` says.
    """
    if port.configure_optimizers is not None:
        name = "configure_optimizers"
        optimizer, scheduler = _unpacked(port.configure_optimizers(model))
    else:
        name, optimizer, scheduler = "torch_optimizer", _of_parameters(port, parameters), None
    if not (hasattr(optimizer, "step") and hasattr(optimizer, "param_groups")):
        advice = "" if port.configure_optimizers else "; use configure_optimizers(model) for (optimizer, scheduler)"
        raise InputError(f"{name}: must return a torch optimizer, and returns {type(optimizer).__name__}{advice}")
    _check_parameters(name, optimizer, parameters)
    if port.torch_scheduler is not None:
        name, scheduler = "torch_scheduler", port.torch_scheduler(optimizer)
    if scheduler is not None and not hasattr(scheduler, "step"):
        kind = type(scheduler).__name__
        raise InputError(f"{name}: must return a scheduler with a method step, and returns {kind}")
    return optimizer, scheduler


def _of_parameters(port: Port, parameters: list[nn.Parameter]) -> Any:
    assert port.torch_optimizer is not None, "checked by Port"
    try:
        return port.torch_optimizer(parameters)
    except AttributeError as error:
        if error.obj is not parameters:
            raise
        raise InputError(
            f"torch_optimizer: is given the list of parameters, which has no {error.name}; for a function of the model "
            "call it configure_optimizers"
        ) from error


def _unpacked(returned: Any) -> Made:
    """Return the optimizer and the scheduler from any return value that Lightning allows of `configure_optimizers`."""
    parts = returned if isinstance(returned, tuple) else (returned, None)
    if len(parts) != 2:
        raise InputError(f"configure_optimizers: must return (optimizer, scheduler), and returns {len(parts)} values")
    optimizer, scheduler = (_only(part, kind) for part, kind in zip(parts, ("optimizer", "scheduler"), strict=True))
    if isinstance(optimizer, dict):
        raise InputError("configure_optimizers: must return an optimizer, or (optimizer, scheduler), not a dictionary")
    return optimizer, scheduler


def _only(part: Any, kind: str) -> Any:
    if not isinstance(part, list):
        return part
    if len(part) > 1 or (kind == "optimizer" and not part):
        raise InputError(f"configure_optimizers: returns {len(part)} {kind}s; must be one")
    return part[0] if part else None


def _check_parameters(name: str, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    trained = {id(parameter) for parameter in parameters}
    others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in trained]
    if others:
        shape = tuple(others[0].shape)
        raise InputError(f"{name}: optimizes a tensor {shape} that is not a parameter of the given model")
