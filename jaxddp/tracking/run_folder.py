"""Run folder: claimed by a single run, with the config that repeats it.

Both trainers use it, so it imports neither jax nor torch.
"""

import contextlib
import dataclasses
import json
import tempfile
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from jaxddp.config import TrainConfig
from jaxddp.errors import InputError
from jaxddp.files import write_atomically

CONFIG_FILE = "config.json"

Config = TypeVar("Config", bound=TrainConfig)


def claim_output(path: str | Path, resume: bool = False) -> Path:
    """Create the run folder, or check an existing one: it must be empty or, with `resume`, hold a run.

    Raises:
        InputError: the folder holds a run or other files, is a file, or cannot be written; with `resume`, it
            holds no run. Nothing is created then.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     claim_output(f"{folder}/runs/first").is_dir()
    True
    """
    path = Path(path)
    where = f"{'--resume' if resume else '--output'} {path}"
    try:
        holds_run = (path / CONFIG_FILE).is_file()
        if resume and not holds_run:
            raise InputError(f"{where}: not a run folder (it has no {CONFIG_FILE})")
        if holds_run and not resume:
            raise InputError(
                f"{where}: already holds a run; choose a new folder, or continue the run with --resume {path}"
            )
        if not path.is_dir() and path.exists():
            raise InputError(f"{where}: is a file; must be a folder")
        _make_writable(path)
        others = [] if resume else sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise InputError(f"{where}: {reason}; must be a writable folder") from None
    if others:
        few = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise InputError(f"{where}: holds other files ({few}); choose a new or empty folder")
    return path


def _make_writable(path: Path) -> None:
    """Create the folder and its parents and try to write there; on failure, remove the created folders."""
    created = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError:
        for folder in created:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def save_config(config: TrainConfig, folder: Path) -> None:
    """Write all options of a run to its folder."""
    fields = dataclasses.asdict(config)
    for name in ("data_path", "weights"):  # absolute, to resume from any working directory
        fields[name] = fields[name] and str(Path(fields[name]).resolve())
    write_atomically(folder / CONFIG_FILE, (json.dumps(fields, indent=2) + "\n").encode())


def load_config(folder: Path, config_class: type[Config]) -> Config:
    """Load the config that `save_config` wrote.

    Raises:
        InputError: the file is not a run's config; the message names the file and the wrong field.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_config(TrainConfig(lr=0.5), Path(folder))
    ...     load_config(Path(folder), TrainConfig).lr
    0.5
    """
    path = folder / CONFIG_FILE
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a run's config ({error})") from error
    known = {field.name for field in dataclasses.fields(config_class)}
    if not isinstance(fields, dict) or not fields.keys() <= known:
        unknown = sorted(fields.keys() - known) if isinstance(fields, dict) else type(fields).__name__
        raise InputError(f"{path}: not a run's config (unknown: {unknown})")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    kinds = get_type_hints(config_class)
    wrong = [f"{name} is {json.dumps(fields[name])}" for name in values if not _fits(values[name], kinds[name])]
    if wrong:
        raise InputError(f"{path}: not a run's config (wrong type: {', '.join(wrong)})")
    try:
        return config_class(**values)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value from JSON has the type of a field; an integer is accepted as a float."""
    parts = get_args(kind)
    if isinstance(kind, UnionType):
        return any(_fits(value, part) for part in parts)
    if get_origin(kind) is tuple:
        if isinstance(value, tuple) and parts[-1] is Ellipsis:
            parts = parts[:1] * len(value)
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_fits, value, parts))
    return type(value) in ((int, float) if kind is float else (kind,))  # isinstance would accept True as an integer
