"""Files of a recording: one folder per process, with a file of JSON lines and a safetensors file per step."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxddp.errors import InputError

FORMAT = "jaxddp.parity recording 1"
LINES = "run.jsonl"
BETWEEN = "|"  # stage | tensor

Stages = Mapping[str, Mapping[str, np.ndarray]]


class RecordingWriter:
    """Writer of one process's part of a recording.

    Args:
        folder: folder of the recording.
        rank: number of the process.
        overwrite: replace what an earlier run of the process has left there.

    Raises:
        InputError: the folder has such a part, and `overwrite` is False.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     writer = RecordingWriter(Path(folder), 0)
    ...     writer.begin({"side": "torch"})
    ...     writer.write(1, {"local_loss": {"loss": np.ones(1)}}, {"lr": 0.1})
    ...     sorted(path.name for path in Path(folder, "rank0").iterdir())
    ['000001.safetensors', 'run.jsonl']
    """

    def __init__(self, folder: Path, rank: int, overwrite: bool = False):
        self._folder, self._rank = rank_folder(folder, rank), rank
        if (self._folder / LINES).exists():
            if not overwrite:
                raise InputError(f"{folder}: has a recording; name a new folder, or give overwrite=True")
            shutil.rmtree(self._folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def begin(self, header: Mapping[str, Any]) -> None:
        """Write the line that describes the run; the first process removes what more processes have left."""
        count = header.get("world_size", 1)
        while self._rank == 0 and ((later := rank_folder(self._folder.parent, count)) / LINES).exists():
            shutil.rmtree(later)
            count += 1
        self._add({"format": FORMAT, **header})

    def write(self, step: int, stages: Stages, notes: Mapping[str, Any]) -> None:
        """Write a step: its arrays, and then its line, so that a step with a line is complete.

        Args:
            step: number of the step, from 1.
            stages: stage -> tensors.
            notes: anything that JSON can hold.
        """
        flat = {f"{stage}{BETWEEN}{name}": x for stage, of_stage in stages.items() for name, x in of_stage.items()}
        path = self._folder / step_file(step)
        save_file({name: np.ascontiguousarray(x).reshape(x.shape) for name, x in flat.items()}, path)
        self._add({"step": step, "file": path.name, "stages": list(stages), **notes})

    def _add(self, line: Mapping[str, Any]) -> None:
        with (self._folder / LINES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def rank_folder(folder: Path, rank: int) -> Path:
    """Return the folder of a process's part."""
    return folder / f"rank{rank}"


def step_file(step: int) -> str:
    """Return the name of a step's file."""
    return f"{step:06}.safetensors"
