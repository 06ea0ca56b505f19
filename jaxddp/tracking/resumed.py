"""Checks of a run folder before its run continues; both trainers use them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxddp.config import TrainerConfig
from jaxddp.config.checks import typed
from jaxddp.config.choices import KEPT_ON_RESUME
from jaxddp.errors import InputError
from jaxddp.tracking.metrics_file import METRICS_FILE, read_metrics
from jaxddp.tracking.run_folder import DATA_FILE


def notes_of_run(config: TrainerConfig, digests: Mapping[str, str], records: int) -> dict[str, Any]:
    """Return what a checkpoint notes of its run, so that a copy in the folder of another run is noticed.

    Args:
        config: configuration of the run, with its number of devices.
        digests: digests of its data.
        records: number of records in its metrics.jsonl.
    """
    return {"config": dataclasses.asdict(config), "data": dict(digests), "records": records}


def check_same_run(
    folder: Path, step: int, notes: Mapping[str, Any], config: TrainerConfig, digests: Mapping[str, str]
) -> list[str]:
    """Check that the run to resume has written its checkpoint, and describe the options that change after it.

    Args:
        folder: run folder.
        step: step of the checkpoint.
        notes: from `notes_of_run`; those of older checkpoints lack names, which are not checked.
        config: configuration of the run to resume, with its number of devices.
        digests: digests of its data.

    Returns:
        A line, or none if nothing changes.

    Raises:
        InputError: the checkpoint is of another run.

    >>> notes = notes_of_run(TrainerConfig(lr=0.1), {}, records=3)
    >>> check_same_run(Path("runs/a"), 40, notes, TrainerConfig(lr=0.2), {})
    ['after step 40: --lr 0.2 instead of 0.1']
    >>> check_same_run(Path("a"), 40, notes, TrainerConfig(seed=1), {})
    Traceback (most recent call last):
    ...
    jaxddp.errors.InputError: --resume a: the checkpoint of step 40 is of another run, with --seed 0 and not --seed 1
    """
    saved = {n: tuple(x) if isinstance(x, list) else x for n, x in notes.get("config", {}).items()}  # JSON has lists
    where = f"--resume {folder}: the checkpoint of step {step} is of another run"
    paths = {"output", "weights", "weights_partial"}  # which may differ
    for name in sorted(saved.keys() & {*KEPT_ON_RESUME} - paths):
        if saved[name] != (value := getattr(config, name)):
            raise InputError(f"{where}, with {typed(name, saved[name])} and not {typed(name, value)}")
    if notes.get("data", digests) != digests and (folder / DATA_FILE).exists():  # without it, any data may be taken
        raise InputError(f"{where}, with other data")
    changes = config.changes(saved)
    return [f"after step {step}: {', '.join(changes)}"] if changes else []


def check_kept(folder: Path, checkpoints: str) -> None:
    """Raise `InputError` if the run has metrics, but its folder of checkpoints is missing."""
    path = folder / METRICS_FILE
    if not (folder / checkpoints).exists() and path.exists() and (history := read_metrics(path)):
        raise InputError(
            f"--resume {folder}: its metrics reach step {history[-1]['step']}, but {checkpoints}/ is missing; "
            "restore that folder, or start again with another --output"
        )


def check_same_epochs(folder: Path, steps_per_epoch: int) -> None:
    """Raise `InputError` unless the epochs that the run has logged have `steps_per_epoch` steps.

    Otherwise its number of steps would mean another position in the data.
    """
    path = folder / METRICS_FILE
    epochs = [record for record in read_metrics(path) if record["kind"] == "epoch"] if path.exists() else []
    if epochs and epochs[-1]["step"] != epochs[-1]["epoch"] * steps_per_epoch:
        check_steps_per_epoch(folder, epochs[-1]["step"] // epochs[-1]["epoch"], steps_per_epoch)


def check_steps_per_epoch(folder: Path, before: int, now: int) -> None:
    """Raise `InputError` unless epochs have as many steps as before."""
    if before != now:
        raise InputError(
            f"--resume {folder}: its epochs had {before} steps and would now have {now}; keep its data and --devices"
        )


def check_not_done(folder: Path | str, step: int, steps_per_epoch: int, epochs: int) -> None:
    """Raise `InputError` if the run has done more than `epochs` epochs.

    >>> check_not_done("run", step=27, steps_per_epoch=12, epochs=2)
    Traceback (most recent call last):
    ...
    jaxddp.errors.InputError: --epochs 2: the run in run has done 2 epochs and 3 steps already
    """
    if step > epochs * steps_per_epoch:
        done, more = divmod(step, steps_per_epoch)
        steps = f" and {more} steps" if more else ""
        raise InputError(f"--epochs {epochs}: the run in {folder} has done {done} epochs{steps} already")
