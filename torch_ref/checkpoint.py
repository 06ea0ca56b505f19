"""Checkpoints of a TrainState, by torch.save; reading one runs no code that it may hold."""

import copy
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from jaxddp.errors import InputError, TrainingError, differences, listed
from jaxddp.runfolder import write_atomically
from torch_ref import optim
from torch_ref.state import TrainState

SCALER = ("scale", "_growth_tracker")  # of torch's GradScaler; its factors are the configuration's


def save_checkpoint(path: Path, state: TrainState) -> None:
    """Write model, optimizer and step; the file is whole at any time. A sharded optimizer is consolidated before.

    Hyperparameters and schedule are not in it: they are the configuration's, and the step's.
    """
    content = {
        "step": state.step,
        "model": state.module.state_dict(),
        "optimizer": state.optimizer.state_dict()["state"],
    }
    if state.averaged is not None:
        content["averaged"] = state.averaged.state_dict()
    if state.scaler.is_enabled():
        content["scaler"] = {"skipped": state.skipped} | {n: state.scaler.state_dict()[n] for n in SCALER}
    for name, tensor in _tensors(content, _names(state)).items():
        if not tensor.isfinite().all():
            raise TrainingError(f"{name} holds a number that is not finite at step {state.step}")
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomically(path, buffer.getvalue())


def load_checkpoint(path: Path, state: TrainState) -> None:
    """Put a new `state` where the saved one was; the steps that follow are bit for bit the same.

    Where the configuration has changed since (another learning rate, more epochs), the new one holds.

    Args:
        state: as built from the configuration, before its first step.

    Raises:
        InputError: there is no checkpoint, or it is of another model or optimizer.
    """
    content = _read(path)
    expected = {"model": state.module.state_dict(), "optimizer": _state_after_a_step(state.optimizer)}
    if state.averaged is not None:
        expected["averaged"] = state.averaged.state_dict()
    names = _names(state)
    if problems := differences(_tensors(content, names), _tensors(expected, names)):
        raise InputError(f"--resume {path.parent}: a checkpoint of another model or optimizer: {listed(problems)}")
    state.module.load_state_dict(content["model"])
    hyperparameters = Optimizer.state_dict(state.optimizer)["param_groups"]  # a sharded one has no state_dict yet
    state.optimizer.load_state_dict({"state": content["optimizer"], "param_groups": hyperparameters})
    if state.averaged is not None:
        state.averaged.load_state_dict(content["averaged"])
    if state.scaler.is_enabled():
        state.skipped = content["scaler"]["skipped"]
        state.scaler.load_state_dict(state.scaler.state_dict() | {n: content["scaler"][n] for n in SCALER})
    state.step = content["step"]
    optim.fast_forward(state.scheduler, state.step - state.skipped)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"--resume {path.parent}: holds no checkpoint of torch_ref (no {path.name} there)")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many types, but always the file's fault
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise InputError(f"--resume {path.parent}: {path.name} cannot be read ({reason})") from None
    if not isinstance(content, dict) or content.keys() - {"averaged", "scaler"} != {"step", "model", "optimizer"}:
        raise InputError(f"--resume {path.parent}: {path.name} is not a checkpoint of torch_ref")
    return content


def _state_after_a_step(optimizer: Optimizer) -> dict[int, Any]:
    """What the optimizer will keep per parameter, if it is sharded on all ranks together: tried out on a copy."""
    kind: Any = type(getattr(optimizer, "optim", optimizer))  # a sharded one has the rank's own inside
    trial = kind(copy.deepcopy(optimizer.param_groups))
    for group in trial.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    trial.step()
    return trial.state_dict()["state"]


def _names(state: TrainState) -> dict[int, str]:
    """The parameters' names by the number that the optimizer has for them."""
    return {number: name for number, (name, _) in enumerate(state.module.named_parameters())}


def _tensors(content: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Tensor]:
    """All tensors by name: "fc.weight" of the model, "fc.weight: exp_avg" of the optimizer."""
    moments = {
        f"{names.get(number, number)}: {name}": value
        for number, values in content["optimizer"].items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }
    averaged = {f"averaged {name}": tensor for name, tensor in content.get("averaged", {}).items()}
    return {**content["model"], **moments, **averaged}
