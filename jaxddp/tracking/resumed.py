"""Checks of a run folder before its run goes on; both trainers use them."""

from pathlib import Path

from jaxddp.errors import InputError
from jaxddp.tracking.metrics_file import METRICS_FILE, read_metrics


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

    Otherwise its number of steps would stand for another position in the data.
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
