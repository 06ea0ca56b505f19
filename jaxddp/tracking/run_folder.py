"""A run's folder: claimed by one run only, its files whole at any time, its config enough to repeat it.

Both trainers use it, so it knows neither jax nor torch.
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
    """Make the run folder, or check an existing one: it must be empty or, with `resume`, hold a run.

    Raises:
        InputError: the folder holds another run or other files, is none, or cannot be written;
            with `resume`, it holds no run. Then nothing was made.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     claim_output(f"{folder}/runs/first").is_dir()
    True
    """
    path = Path(path)
    where = f"{'--resume' if resume else '--output'} {path}"
    try:
        holds_run = (path / CONFIG_FILE).is_file()
        if resume and not holds_run:
            raise InputError(f"{where}: holds no run (no {CONFIG_FILE} there)")
        if holds_run and not resume:
            raise InputError(f"{where}: holds a run already; choose a new folder, or go on with it by --resume {path}")
        if not path.is_dir() and path.exists():
            raise InputError(f"{where}: is a file; needs a folder")
        _make_writable(path)
        others = [] if resume else sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise InputError(f"{where}: {reason}; needs a folder that can be written") from None
    if others:
        few = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise InputError(f"{where}: holds other files ({few}); choose a new or empty folder")
    return path


def _make_writable(path: Path) -> None:
    """Make the folder and its parents and try to write there; on failure, remove what was made."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def save_config(config: TrainConfig, folder: Path) -> None:
    """Write every knob of a run into its folder."""
    fields = dataclasses.asdict(config)
    for name in ("data_path", "weights"):  # the run may be resumed from elsewhere
        fields[name] = fields[name] and str(Path(fields[name]).resolve())
    write_atomically(folder / CONFIG_FILE, (json.dumps(fields, indent=2) + "\n").encode())


def load_config(folder: Path, config_class: type[Config]) -> Config:
    """Read what `save_config` wrote.

    Raises:
        InputError: names the file, and the field that is wrong.

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
    """Whether a value read from JSON has a field's type; an integer will do for a float."""
    parts = get_args(kind)
    if isinstance(kind, UnionType):
        return any(_fits(value, part) for part in parts)
    if get_origin(kind) is tuple:
        if isinstance(value, tuple) and parts[-1] is Ellipsis:
            parts = parts[:1] * len(value)
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_fits, value, parts))
    return type(value) in ((int, float) if kind is float else (kind,))  # so written, true is no integer
