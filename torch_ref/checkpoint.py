"""Checkpoints of a TrainState, written by torch.save; loading one runs no code stored in it."""

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
from torch.optim.lr_scheduler import ReduceLROnPlateau

from jaxddp.errors import InputError, TrainingError, differences, listed, reason
from jaxddp.files import write_atomically
from torch_ref import optim
from torch_ref.distributed import World
from torch_ref.program_step import Optimizers
from torch_ref.state import TrainState

CHECKPOINT_FILE = "checkpoint.pt"
PLATEAU = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")  # state of torch's ReduceLROnPlateau
SCALER = ("scale", "_growth_tracker")  # state of torch's GradScaler; its factors are in the configuration
Content = dict[str, Any]  # checkpoint of one rank
OPTIONAL = {"averaged", "scaler", "plateau", "others", "notes", "schedule"}  # parts that not every run has


def save_checkpoint(
    path: Path, state: TrainState, others: Sequence[Content] = (), notes: Mapping[str, Any] | None = None
) -> None:
    """Write model, optimizer state and step; the file is never partial.

    Hyperparameters and schedule are left out, but for those of a program's step: they follow from the configuration
    and the step.

    Args:
        path: file to write.
        state: state of rank 0, after `consolidate` if the optimizer is sharded.
        others: states of ranks 1, 2, ... from `of_others`, if ranks differ.
        notes: numbers, strings, and tuples and dictionaries of them, which `load_checkpoint` returns.

    Raises:
        TrainingError: the state holds a NaN, or an infinity that is not in a buffer.
        OSError: the file cannot be written. An earlier checkpoint stays.
    """
    content, buffers = _content(state), {name for name, _ in state.module.named_buffers()}
    for of_rank in (content, *others):
        for name, tensor in _tensors(of_rank, _names(state)).items():
            may_be_infinite = name in buffers or name.removeprefix("averaged module.") in buffers
            if tensor.isnan().any() or not (may_be_infinite or tensor.isfinite().all()):
                raise TrainingError(f"{name} is not finite at step {state.step}")
    if others:
        content["others"] = list(others)
    buffer = io.BytesIO()
    torch.save(content | {"notes": dict(notes or {})}, buffer)
    write_atomically(path, buffer.getvalue())


def checkpoint_size(state: TrainState) -> int:
    """Return the bytes of the tensors in a checkpoint of a rank."""
    return sum(tensor.nbytes for tensor in _tensors(_expected(state), _names(state)).values())


def of_others(state: TrainState, world: World) -> list[Content]:
    """Gather the states of the other ranks on rank 0; all ranks must call it."""
    every: list[Content] = [{} for _ in range(world.world_size)]
    if world.world_size > 1:
        dist.gather_object(_content(state), every if world.rank == 0 else None, group=world.group, group_dst=0)
    return every[1:]


def load_checkpoint(path: Path, state: TrainState, rank: int = 0) -> dict[str, Any]:
    """Load a checkpoint into a new state, and return its notes; the steps that follow are the same, bit for bit.

    If the configuration has changed since (another learning rate, more epochs), the new one holds.

    Args:
        path: file to read.
        state: state built from the configuration, before its first step; changed in place.
        rank: rank whose state is loaded, if ranks differ.

    Raises:
        InputError: no checkpoint, a damaged one, or one of another model or optimizer.
    """
    content = _read(path)
    notes: dict[str, Any] = content.get("notes", {})
    if rank > 0 and "others" in content:
        content = content["others"][rank - 1]
    names = _names(state)
    if problems := differences(_tensors(content, names), _tensors(_expected(state), names)):
        raise InputError(f"--resume {path.parent}: a checkpoint of another model or optimizer: {listed(problems)}")
    state.module.load_state_dict(content["model"])
    groups = _hyperparameters(state.optimizer)
    state.optimizer.load_state_dict({"state": content["optimizer"], "param_groups": groups, "step": content["step"]})
    if isinstance(state.optimizer, Optimizers) and "schedule" in content:
        state.optimizer.load_schedule(content["schedule"])
    if state.averaged is not None:
        state.averaged.load_state_dict(content["averaged"])
    if state.scaler.is_enabled():
        state.skipped = content["scaler"]["skipped"]
        state.scaler.load_state_dict(state.scaler.state_dict() | {n: content["scaler"][n] for n in SCALER})
    if state.plateau is not None:
        load_plateau(state.plateau, content["plateau"])
    state.step = content["step"]
    optim.fast_forward(state.scheduler, state.step - state.skipped)
    return notes


def load_plateau(plateau: ReduceLROnPlateau, content: Mapping[str, Any]) -> None:
    """Give a new scheduler the state of a checkpoint, and its optimizer the rates."""
    for name in PLATEAU:
        setattr(plateau, name, content[name])
    for group, rate in zip(plateau.optimizer.param_groups, content["rates"], strict=True):
        group["lr"] = rate


def _content(state: TrainState) -> Content:
    content = {
        "step": state.step,
        "model": state.module.state_dict(),
        "optimizer": state.optimizer.state_dict()["state"],
    }
    if isinstance(state.optimizer, Optimizers):
        content["schedule"] = state.optimizer.schedule()
    if state.averaged is not None:
        content["averaged"] = state.averaged.state_dict()
    if (plateau := state.plateau) is not None:
        rates = [float(group["lr"]) for group in state.optimizer.param_groups]
        content["plateau"] = {"rates": rates} | {name: getattr(plateau, name) for name in PLATEAU}
    if state.scaler.is_enabled():
        content["scaler"] = {"skipped": state.skipped} | {n: state.scaler.state_dict()[n] for n in SCALER}
    return content


def _expected(state: TrainState) -> Content:
    """Return the model's and the optimizer's part of a checkpoint, of a state that may be new."""
    expected = {"model": state.module.state_dict(), "optimizer": _state_after_a_step(state.optimizer)}
    return expected if state.averaged is None else expected | {"averaged": state.averaged.state_dict()}


def _hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups in state_dict form; a sharded optimizer has no state_dict before `consolidate`."""
    numbers = itertools.count()
    return [{**group, "params": [next(numbers) for _ in group["params"]]} for group in optimizer.param_groups]


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"--resume {path.parent}: holds no checkpoint of torch_ref (no {path.name} there)")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many types, but always because of the file
        raise InputError(
            f"--resume {path.parent}: {path.name} cannot be read ({reason(error).partition('. ')[0]})"
        ) from None
    if not isinstance(content, dict) or content.keys() - OPTIONAL != {"step", "model", "optimizer"}:
        raise InputError(f"--resume {path.parent}: {path.name} is not a checkpoint of torch_ref")
    return content


def _state_after_a_step(optimizer: Optimizer) -> dict[int, Any]:
    """Return the optimizer's state after one step, taken on a copy; of a sharded optimizer, for all ranks together."""
    if isinstance(optimizer, Optimizers):
        trials = [_state_after_a_step(one) for one in optimizer.each]
        return {
            first + n: state
            for first, trial in zip(optimizer.firsts, trials, strict=True)
            for n, state in trial.items()
        }
    kind: Any = type(getattr(optimizer, "optim", optimizer))  # a wrapper holds the optimizer as `optim`
    trial = kind(copy.deepcopy(optimizer.param_groups))
    for group in trial.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    trial.step()
    return trial.state_dict()["state"]


def _names(state: TrainState) -> dict[int, str]:
    """Return the parameters' names by their numbers in the optimizer."""
    return {number: name for number, (name, _) in enumerate(state.module.named_parameters())}


def _tensors(content: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Tensor]:
    """Return all tensors by name: "fc.weight" of the model, "fc.weight: exp_avg" of the optimizer."""
    moments = {
        f"{names.get(number, number)}: {name}": value
        for number, values in content["optimizer"].items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }
    averaged = {f"averaged {name}": tensor for name, tensor in content.get("averaged", {}).items()}
    return {**content["model"], **moments, **averaged}
