"""Read one process's part of a recording, and check everything that is read of it."""

import contextlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jaxddp.errors import InputError, listed, shortened
from jaxddp.files import check_regular
from jaxddp.parity.projections import COUNT
from jaxddp.parity.recorder.excerpt_grid import strides_of
from jaxddp.parity.recorder.files import BETWEEN, FORMAT, LINES, rank_folder, step_file
from jaxddp.parity.records import Tensors

LOCAL = ("samples", "local_loss", "local_gradients", "replica_gradients")  # stages of every process, joined
SHAPELESS = ("samples", "local_loss", "norms", "projections")  # whose tensors are not shaped as the model's
WHOLE = ("params", "update")  # which have all parameters, if a step shows them; torch's steps do

MOST = 2**40  # of any number of things
MOST_ELEMENTS = 2**33  # of a tensor: the comparison needs 8 bytes for each
MOST_AXES = 32  # NumPy has 64
# What values raise that are not what they should be.
DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)


@dataclass(frozen=True)
class Part:
    """Part of one process.

    Attributes:
        folder: its folder.
        header: description of the run.
        lines: number of a step -> its line.
        unfinished: the step within which the part ends; None: it ends with a whole step.
    """

    folder: Path
    header: dict[str, Any]
    lines: dict[int, dict[str, Any]]
    unfinished: int | None

    def arrays(self, number: int) -> dict[str, Tensors]:
        """Return a step's stages.

        Raises:
            InputError: the file is missing, damaged, or not in the folder.
        """
        path = self.folder / step_file(number)
        try:
            flat = load_file(_checked(path))
        except (OSError, SafetensorError, *DAMAGE) as error:
            raise _refusal(path, error) from None
        stages: dict[str, Tensors] = {}
        for key, value in flat.items():
            stage, _, name = key.partition(BETWEEN)
            if self._fits(stage, name, value):
                stages.setdefault(stage, {})[name] = value
            elif stage in SHAPELESS or name in self._shapes:
                says = f"{shortened(repr(key))} has shape {value.shape}, which {LINES} contradicts"
                raise InputError(f"{path}: damaged: {says}")
        needed = {"local_loss", *(WHOLE if "groups" in self.lines[number] else ())}
        if missing := needed - stages.keys():
            raise InputError(f"{path}: damaged: has no {listed(sorted(missing), joint=', ')}")
        for stage in WHOLE:
            if stage in stages and stages[stage].keys() != self._parameters:
                raise InputError(f"{path}: damaged: {stage} lack some parameters")
        return stages

    @cached_property
    def _parameters(self) -> set[str]:
        tensors, tied = self.header["tensors"], self.header.get("tied", {})
        return {name for name, (_, _, kind) in tensors.items() if kind == "parameter" and name not in tied}

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the excerpts of the model's tensors."""
        limit = self.header["limit"]
        shapes = {name: tuple(shape) for name, (shape, *_) in self.header["tensors"].items()}
        return {
            name: tuple(-(-size // stride) for size, stride in zip(shape, strides_of(shape, limit), strict=True))
            for name, shape in shapes.items()
        }

    def _fits(self, stage: str, name: str, x: np.ndarray) -> bool:
        """Return whether an array has the shape that the header says; of a state, only arrays like a parameter do."""
        if x.dtype.kind not in "biuf":
            return False
        replicas = self.header["replicas"]
        if stage == "samples":
            return x.ndim == (2 if name.endswith(":hash") else 3) and len(x) == replicas
        if stage == "local_loss":
            return x.ndim == 1 and name == "loss"  # of each replica, device or example
        if stage == "norms":
            return x.size == 1
        if stage == "projections":
            return x.shape == (COUNT,) and x.dtype.kind == "f"
        shape = self._shapes.get(name, self._shapes.get(name.partition(":")[2]))
        return shape is not None and x.shape == ((replicas, *shape) if stage in LOCAL else shape)


def read_part(folder: Path, rank: int) -> Part:
    """Read a process's lines.

    A killed process may leave its last line unfinished. Whatever else is wrong is damage.

    Raises:
        InputError: there is no such part, or it is damaged.
    """
    part = rank_folder(folder, rank)
    path = part / LINES
    if not path.exists():
        raise InputError(f"{folder}: not a recording of jaxddp.parity.Recorder (it has no {part.name}/{LINES})")
    try:
        header, *lines, last = _checked(path).read_bytes().split(b"\n")
        described = _parsed(header)
        if (form := described.get("format")) != FORMAT:
            raise InputError(f"{path}: format is {shortened(repr(form))}; must be {FORMAT!r}")
        _check(described, HEADER | (OF_TORCH if described.get("side") == "torch" else {}))
        steps = [_parsed(line) for line in lines]
        is_cut = bool(last)
        with contextlib.suppress(*DAMAGE):  # it may lack only its end
            steps.append(_parsed(last))
            is_cut = False
        for before, step in zip([{"step": 0}, *steps], steps, strict=False):
            _check(step, STEP | (GROUPS if described["side"] == "torch" and rank == 0 else {}))
            if step["step"] <= before["step"] or step["file"] != step_file(step["step"]):
                raise ValueError(f"step {step['step']} after step {before['step']}, file {step['file']!r}")
    except (OSError, *DAMAGE) as error:
        raise _refusal(path, error) from None
    number = re.match(rb'{"step": (\d{1,12}),', last) if is_cut else None
    behind = max((step["step"] for step in steps), default=0) + 1
    unfinished = max(int(number[1]) if number else 0, behind) if is_cut else None
    return Part(part, described, {step["step"]: step for step in steps}, unfinished)


def _checked(path: Path) -> Path:
    """Return the path of a regular file that is in its folder itself, not reached through a link."""
    check_regular(str(path), path)
    if path.is_dir():
        raise InputError(f"{path}: is a folder; must be a file")
    if path.resolve().parent != path.parent.resolve():
        raise InputError(f"{path}: is a link that leads out of its folder; must be a file")
    return path


def _refusal(path: Path, error: BaseException) -> InputError:
    if isinstance(error, InputError):
        return error
    if isinstance(error, FileNotFoundError):
        return InputError(f"{path}: no such file")
    if isinstance(error, OSError):
        return InputError(f"{path}: {(error.strerror or str(error)).lower()}")
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return InputError(f"{path}: damaged: {shortened(f'{kind}{error}')}")


def _parsed(line: bytes) -> dict[str, Any]:
    parsed = json.loads(line.decode())
    if not isinstance(parsed, dict):
        raise TypeError(f"{parsed!r} is no description")
    return parsed


def _check(line: Mapping[str, Any], forms: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless a line has what is read of it."""
    for name, form in forms.items():
        if not (_fits(line.get(name), form) or (name in OPTIONAL and line.get(name) is None)):
            raise ValueError(f"{name} is {line.get(name)!r}")


def _fits(x: Any, form: Any) -> bool:
    """Return whether a JSON value has a form.

    Args:
        x: the value.
        form: [of all items], (of each item), {"": of all values}, a range, a set of words, a type, or a function.
    """
    if isinstance(form, list):
        return isinstance(x, list) and all(_fits(item, form[0]) for item in x)
    if isinstance(form, tuple):
        return isinstance(x, list) and len(x) == len(form) and all(map(_fits, x, form))
    if isinstance(form, dict):
        return isinstance(x, dict) and all(_fits(item, form[""]) for item in x.values())
    if isinstance(form, range | set):  # a range is searched one by one for anything but an integer
        return type(x) is (int if isinstance(form, range) else str) and x in form
    return type(x) is form if isinstance(form, type) else bool(form(x))


def _is_shape(x: Any) -> bool:
    return _fits(x, [range(MOST)]) and len(x) <= MOST_AXES and math.prod(x) <= MOST_ELEMENTS


def _is_finite(x: Any) -> bool:
    return isinstance(x, int | float) and math.isfinite(x)


def _is_group(x: Any) -> bool:
    options = {**x, "names": []}
    are_right = _fits(options, {"": lambda value: isinstance(value, int | float) or _fits(value, [_is_finite])})
    return are_right and _is_finite(x.get("lr")) and _fits(x.get("names"), [str])


HEADER = {
    "side": {"torch", "jax"},
    **dict.fromkeys(("world_size", "replicas"), range(1, MOST)),
    "limit": range(1, 2**64),
    "tensors": {"": (_is_shape, str, {"parameter", "buffer"})},
}
OF_TORCH = {"optimizer": str, "tied": {"": str}, "modules": {"": (str, {"": _is_finite})}}
STEP = {
    **dict.fromkeys(("step", "micro_batches"), range(1, MOST)),
    "loss": float,
    "entries": {"": (lambda x: _is_shape(x) and x, str)},
    "kinked": [str],
    "hyperparameters": {"": _is_finite},
    "lr": _is_finite,
    **dict.fromkeys(("update", "autocast"), str),
}
OPTIONAL = ("kinked", "hyperparameters", "lr", "update", "autocast")
GROUPS = {"groups": lambda x: bool(x) and _fits(x, [_is_group])}
