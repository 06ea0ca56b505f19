"""Checkpoints of a TrainState, by torch.save; reading one runs no code that it may hold."""

import copy
import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from jaxddp.errors import InputError, TrainingError, differences, listed
from jaxddp.files import write_atomically
from torch_ref import optim
from torch_ref.distributed import World
from torch_ref.state import TrainState

SCALER = ("scale", "_growth_tracker")  # of torch's GradScaler; its factors are the configuration's
Content = dict[str, Any]  # of a rank


def save_checkpoint(path: Path, state: TrainState, others: Sequence[Content] = ()) -> None:
    """Write model, optimizer and step; the file is whole at any time. A sharded optimizer is consolidated before.

    Hyperparameters and schedule are not in it: they are the configuration's, and the step's.

    Args:
        others: what ranks 1, 2, ... have of their own, from `of_others`.
    """
    content = _content(state)
    for of_rank in (content, *others):
        for name, tensor in _tensors(of_rank, _names(state)).items():
            if not tensor.isfinite().all():
                raise TrainingError(f"{name} holds a number that is not finite at step {state.step}")
    if others:
        content["others"] = list(others)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomically(path, buffer.getvalue())


def of_others(state: TrainState, world: World) -> list[Content]:
    """Bring to rank 0 what the other ranks have in the place of its own; every rank calls it."""
    every: list[Content] = [{} for _ in range(world.world_size)]
    if world.world_size > 1:
        dist.gather_object(_content(state), every if world.rank == 0 else None, group=world.group, group_dst=0)
    return every[1:]


def load_checkpoint(path: Path, state: TrainState, rank: int = 0) -> None:
    """Put a new `state` where the saved one was; the steps that follow are bit for bit the same.

    Where the configuration has changed since (another learning rate, more epochs), the new one holds.

    Args:
        state: as built from the configuration, before its first step.
        rank: whose own it is, where ranks have something of their own.

    Raises:
        InputError: there is no checkpoint, or it is of another model or optimizer.
    """
    content = _read(path)
    if rank > 0 and "others" in content:
        content = content["others"][rank - 1]
    expected = {"model": state.module.state_dict(), "optimizer": _state_after_a_step(state.optimizer)}
    if state.averaged is not None:
        expected["averaged"] = state.averaged.state_dict()
    names = _names(state)
    if problems := differences(_tensors(content, names), _tensors(expected, names)):
        raise InputError(f"--resume {path.parent}: a checkpoint of another model or optimizer: {listed(problems)}")
    state.module.load_state_dict(content["model"])
    groups = _hyperparameters(state.optimizer)
    state.optimizer.load_state_dict({"state": content["optimizer"], "param_groups": groups, "step": content["step"]})
    if state.averaged is not None:
        state.averaged.load_state_dict(content["averaged"])
    if state.scaler.is_enabled():
        state.skipped = content["scaler"]["skipped"]
        state.scaler.load_state_dict(state.scaler.state_dict() | {n: content["scaler"][n] for n in SCALER})
    state.step = content["step"]
    optim.fast_forward(state.scheduler, state.step - state.skipped)


def _content(state: TrainState) -> Content:
    content = {
        "step": state.step,
        "model": state.module.state_dict(),
        "optimizer": state.optimizer.state_dict()["state"],
    }
    if state.averaged is not None:
        content["averaged"] = state.averaged.state_dict()
    if state.scaler.is_enabled():
        content["scaler"] = {"skipped": state.skipped} | {n: state.scaler.state_dict()[n] for n in SCALER}
    return content


def _hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups as a state_dict has them, which a sharded optimizer has not yet."""
    numbers = itertools.count()
    return [{**group, "params": [next(numbers) for _ in group["params"]]} for group in optimizer.param_groups]


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"--resume {path.parent}: holds no checkpoint of torch_ref (no {path.name} there)")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many types, but always the file's fault
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise InputError(f"--resume {path.parent}: {path.name} cannot be read ({reason})") from None
    if not isinstance(content, dict) or content.keys() - {"averaged", "scaler", "others"} != {
        "step",
        "model",
        "optimizer",
    }:
        raise InputError(f"--resume {path.parent}: {path.name} is not a checkpoint of torch_ref")
    return content


def _state_after_a_step(optimizer: Optimizer) -> dict[int, Any]:
    """What the optimizer will keep per parameter, if it is sharded on all ranks together: tried out on a copy."""
    kind: Any = type(getattr(optimizer, "optim", optimizer))  # that of a wrapper is inside
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
