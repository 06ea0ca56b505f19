"""Read a recording from its folder."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jaxddp.errors import InputError, described, reason
from jaxddp.parity.recorder.files import BETWEEN, FORMAT, LINES, rank_folder
from jaxddp.parity.records import Tensors

LOCAL = ("samples", "local_loss", "local_gradients", "replica_gradients")  # stages of every process, joined


class RecordedStep:
    """One step of a recording, whose stages are read when they are asked for.

    Attributes:
        number: number of the step, from 1.
        notes: notes of the first process.
    """

    def __init__(self, number: int, lines: list[tuple[Path, dict[str, Any]]]):
        self.number, self.notes = number, lines[0][1]
        self._paths = [folder / f"{line.get('file')}" for folder, line in lines]

    def __getitem__(self, stage: str) -> Tensors:
        """Return a stage's tensors, {} if the step does not show it; local ones (replicas, ...)."""
        if stage not in LOCAL:
            return self._files[0].get(stage, {})
        of_ranks = [file.get(stage, {}) for file in self._files]
        shapes = [{name: x.shape[1:] for name, x in of_rank.items()} for of_rank in of_ranks]
        if any(other != shapes[0] for other in shapes):
            if stage == "samples":
                raise InputError(f"{self._paths[0].parent.parent}: step {self.number}: ranks have unequal batches")
            return {}
        return {name: np.concatenate([of_rank[name] for of_rank in of_ranks]) for name in of_ranks[0]}

    @cached_property
    def _files(self) -> list[dict[str, Tensors]]:
        return [_read(path) for path in self._paths]


class Recording:
    """A recording of one side.

    Args:
        folder: folder that a `Recorder` has written; that of several machines has the `rank` folders of all.

    Attributes:
        folder: the folder.
        header: first process's description of the run.
        steps: number -> step, for the steps that every process has.
        world_size: number of replicas.
        unfinished: the step within which the recording ends; None: it ends behind one.

    Raises:
        InputError: there is no recording, a process's part is missing, or a file is damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.unfinished: int | None = None
        if not folder.is_dir():
            raise InputError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}")
        parts = [_lines(rank_folder(folder, 0), folder)]
        self.header = parts[0][0]
        count = self.header["world_size"]
        for rank in range(1, count):
            if not (rank_folder(folder, rank) / LINES).exists():
                raise InputError(f"{folder}: rank{rank} of {count} processes is missing; copy it from its machine")
            parts.append(_lines(rank_folder(folder, rank), folder))
        self.world_size = sum(header["replicas"] for header, _ in parts)
        common = set.intersection(*(set(lines) for _, lines in parts))
        self.steps = {
            number: RecordedStep(number, [(rank_folder(folder, r), part[1][number]) for r, part in enumerate(parts)])
            for number in sorted(common)
        }
        if not self.steps:
            raise InputError(f"{folder}: has no step yet")

    @property
    def side(self) -> str:
        """Return "torch" or "jax"."""
        return str(self.header["side"])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the model's tensors by name."""
        return {name: tuple(shape) for name, (shape, *_) in self.header["tensors"].items()}

    @property
    def limit(self) -> int:
        """Return the largest number of elements that were kept of a tensor."""
        return int(self.header["limit"])

    def of_kind(self, kind: str) -> list[str]:
        """Return the names of the parameters ("parameter") or buffers ("buffer")."""
        return [name for name, (_, _, one) in self.header["tensors"].items() if one == kind]

    @property
    def epsilon(self) -> float:
        """Return the precision in which the run computes: that of its parameters, or of what autocast chose."""
        names = {step.notes.get("autocast") or "float64" for step in self.steps.values()}
        return max(self.parameter_epsilon, *(EPSILONS.get(name, EPSILONS["float32"]) for name in names))

    @property
    def parameter_epsilon(self) -> float:
        """Return the coarsest precision of a parameter."""
        names = {dtype for _, dtype, kind in self.header["tensors"].values() if kind == "parameter"}
        return max(EPSILONS.get(name, EPSILONS["float32"]) for name in names)


EPSILONS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def _lines(part: Path, folder: Path) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Return the header of a process's part, and its steps' lines by number."""
    path = part / LINES
    if not path.exists():
        raise InputError(f"{folder}: not a recording of jaxddp.parity.Recorder (it has no {part.name}/{LINES})")
    texts = path.read_text("utf-8", errors="replace").split("\n")[:-1]  # a killed run may end within a line
    try:
        header, *steps = (json.loads(text) for text in texts)
        found = header.get("format")
        by_number = {int(line["step"]): line for line in steps}
        _check_header(header)
        for line in steps:
            _check_step(line, header["side"] == "torch" and part.name == rank_folder(folder, 0).name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: damaged: {described(error, most=100)}") from None
    if found != FORMAT:
        raise InputError(f"{path}: format is {found!r}; must be {FORMAT!r}")
    return header, by_number


def _check_header(header: Mapping[str, Any]) -> None:
    """Raise `ValueError`, `KeyError` or `TypeError` unless a header has what is read of it."""
    if header.get("format") != FORMAT:
        return
    if header["side"] not in ("torch", "jax"):
        raise ValueError(f"side {header['side']!r}")
    for name in ("world_size", "replicas", "limit"):
        if type(header[name]) is not int or not 1 <= header[name] <= 2**40:
            raise ValueError(f"{name} {header[name]!r}")
    for shape, dtype, kind in header["tensors"].values():
        if not all(type(size) is int and size >= 0 for size in shape) or not isinstance(dtype, str):
            raise ValueError(f"tensor {shape!r} {dtype!r} {kind!r}")


def _check_step(line: Mapping[str, Any], has_groups: bool) -> None:
    """Raise `ValueError`, `KeyError` or `TypeError` unless a step's line has what is read of it."""
    for shape, dtype in line["entries"].values():
        if not all(type(size) is int and size >= 0 for size in shape) or not isinstance(dtype, str):
            raise ValueError(f"entry {shape!r} {dtype!r}")
    if float(line["loss"]) is None or type(line["micro_batches"]) is not int or line["micro_batches"] < 1:
        raise ValueError(f"micro_batches {line['micro_batches']!r}")
    if has_groups and not all(isinstance(group["lr"], int | float) and group["names"] for group in line["groups"]):
        raise ValueError("groups")


def _read(path: Path) -> dict[str, Tensors]:
    try:
        flat = load_file(path)
    except (OSError, SafetensorError) as error:
        says = "no such file" if isinstance(error, FileNotFoundError) else f"damaged: {reason(error, most=100)}"
        raise InputError(f"{path}: {says}") from None
    stages: dict[str, Tensors] = {}
    for key, value in flat.items():
        stage, _, name = key.partition(BETWEEN)
        stages.setdefault(stage, {})[name] = value
    return stages
