"""Run folder: used by one process at a time, with the config that repeats its run and digests of its data.

Both trainers use it, so it imports neither jax nor torch.
"""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxddp.config import TrainerConfig
from jaxddp.config.choices import flag_kinds
from jaxddp.config.kinds import fits
from jaxddp.errors import InputError, listed
from jaxddp.files import UNFINISHED, read_json, reason_of, write_atomically
from jaxddp.tracking.folder_lock import LOCK_FILE, hold

CONFIG_FILE = "config.json"
DATA_FILE = "data.json"  # digests of the run's data
PROGRAM_FOLDER, PROGRAM_FILE = "program", "program.json"  # see `jaxddp.tracking.kept_program`
LEFTOVERS = (LOCK_FILE, PROGRAM_FOLDER, PROGRAM_FILE)  # of a run that was killed at its start
LEAST_SPACE = 100_000  # bytes for the logs of a short run

Config = TypeVar("Config", bound=TrainerConfig)


@contextlib.contextmanager
def claim_output(path: str | Path, resume: bool = False, space: int = 0) -> Iterator[Path]:
    """Claim a run folder until the context ends: a new or empty one or, with `resume`, one that holds a run.

    A run that was killed before it wrote its config leaves an empty folder (`LEFTOVERS` do not count).

    Args:
        path: folder; created with its parents if it is missing.
        resume: whether to continue the run in the folder.
        space: bytes that the run will write at least.

    Raises:
        InputError: the folder holds a run or other files, is a file, cannot be written, or another process owns it;
            the disk is too full; with `resume`, the folder holds no run. Nothing is created then.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, claim_output(f"{folder}/runs/first") as claimed:
    ...     claimed.is_dir()
    True
    """
    path = Path(path)
    where = f"{'--resume' if resume else '--output'} {path}"
    with contextlib.ExitStack() as resources:
        try:
            _check_claimable(path, where, resume)
            _check_space(path, where, space)
            with _created(path):
                resources.enter_context(hold(path, where))
            _check_claimable(path, where, resume)  # again: another run may have ended since
        except OSError as error:
            raise InputError(f"{where}: {reason_of(error)}; must be a writable folder") from None
        yield path


def _check_claimable(path: Path, where: str, resume: bool) -> None:
    """Raise `InputError` unless the folder holds a run to resume or, without `resume`, nothing."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: its path is not UTF-8, as checkpoints need it; choose another folder") from None
    if path.exists() and not path.is_dir():  # in this order: another run may create the folder in between
        raise InputError(f"{where}: is a file; must be a folder")
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if resume and CONFIG_FILE not in names:
        raise InputError(f"{where}: not a run folder (it has no {CONFIG_FILE})")
    if resume:
        return
    if CONFIG_FILE in names:
        raise InputError(f"{where}: already holds a run; choose a new folder, or continue the run with --resume {path}")
    left = {name for name in names if name in LEFTOVERS or name.endswith(UNFINISHED)} if LOCK_FILE in names else set()
    if others := sorted(names - left):
        raise InputError(f"{where}: holds other files ({listed(others, joint=', ')}); choose a new or empty folder")


def _check_space(path: Path, where: str, space: int) -> None:
    """Raise `InputError` if the disk has less than `space` bytes free; one that reports no size is trusted."""
    disk = shutil.disk_usage(next(folder for folder in (path, *path.absolute().parents) if folder.is_dir()))
    needed = max(space, LEAST_SPACE)
    if disk.total and disk.free < needed:
        raise InputError(
            f"{where}: the disk has {disk.free / 1e6:.1f} MB free and the run needs {needed / 1e6:.1f} MB or more; "
            "free some, or choose a folder on another disk"
        )


@contextlib.contextmanager
def _created(path: Path) -> Iterator[None]:
    """Create a folder and its parents; if the context fails, remove them."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield
    except OSError:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def save_config(config: TrainerConfig, folder: Path) -> None:
    """Write all options of a run to its folder."""
    fields = dataclasses.asdict(config)
    for name in ("data_path", "weights", "weights_partial"):  # absolute, to resume from any working directory
        if fields.get(name):
            fields[name] = str(Path(fields[name]).resolve())
    write_atomically(folder / CONFIG_FILE, (json.dumps(fields, indent=2) + "\n").encode())


def save_digests(digests: Mapping[str, str], folder: Path) -> None:
    """Write the digests of a run's data ("train", "test") to its folder."""
    write_atomically(folder / DATA_FILE, (json.dumps(dict(digests), indent=2) + "\n").encode())


def check_same_data(folder: Path, digests: Mapping[str, str], program: str | None = None) -> None:
    """Raise `InputError` unless the run to resume had data with these digests.

    Args:
        program: the program that gives the data; None: they come from --data-path.

    A run that was killed before it wrote digests has no step yet, and may have any data.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_digests({"train": "12", "test": "34"}, Path(folder))
    ...     check_same_data(Path(folder), {"test": "34", "train": "12"})
    """
    path = folder / DATA_FILE
    if not path.exists():
        return
    saved = read_json(path, advice="; remove it to resume with any data")
    if not isinstance(saved, dict) or saved.keys() != digests.keys():
        raise InputError(f"{path}: not the digests of a run's data; remove it to resume with any data")
    names = {"train": "training", "test": "test"}
    if changed := [names.get(name, name) for name in digests if digests[name] != saved[name]]:
        raise InputError(
            f"--resume {folder}: the {' and '.join(changed)} data are not those that the run started with; "
            + (f"{program} must give the same" if program else "restore the file, or give its new place by --data-path")
        )


def load_config(folder: Path, config_class: type[Config]) -> Config:
    """Load the config that `save_config` wrote.

    Raises:
        InputError: the file is not a run's config; the message names the file and the wrong field.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_config(TrainerConfig(lr=0.5), Path(folder))
    ...     load_config(Path(folder), TrainerConfig).lr
    0.5
    """
    path = folder / CONFIG_FILE
    fields = read_json(path, "not a run's config")
    program = getattr(config_class, "PROGRAM", None)
    known = {field.name for field in dataclasses.fields(config_class)}
    if not isinstance(fields, dict) or not fields.keys() <= known:
        unknown = sorted(fields.keys() - known) if isinstance(fields, dict) else type(fields).__name__
        if isinstance(fields, dict) and program is not None and program.path is not None:
            raise InputError(f"{path}: the run has {', '.join(unknown)}, which is no option of {program.name}")
        raise InputError(f"{path}: not a run's config (unknown: {unknown})")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    kinds = flag_kinds(config_class)
    wrong = [f"{name} is {json.dumps(fields[name])}" for name in values if not fits(values[name], kinds[name])]
    if wrong:
        raise InputError(f"{path}: not a run's config (wrong type: {', '.join(wrong)})")
    try:
        return config_class(**values)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
