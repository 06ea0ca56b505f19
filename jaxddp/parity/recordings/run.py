"""Read a recording from its folder."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from jaxddp.errors import InputError, listed
from jaxddp.parity.recorder.files import LINES, rank_folder
from jaxddp.parity.recordings.lines import LOCAL, Part, read_part
from jaxddp.parity.records import Tensors
from jaxddp.parity.sums import Summand, folded


class RecordedStep:
    """One step of a recording, whose stages are read when they are asked for.

    Attributes:
        number: number of the step, from 1.
        notes: notes of the first process.
    """

    def __init__(self, number: int, parts: Sequence[Part], summands: Sequence[Summand]):
        self.number, self.notes, self._parts, self._summands = number, parts[0].lines[number], parts, summands

    @property
    def hyperparameters(self) -> dict[str, float]:
        """Hyperparameters that a step of JAX shows, under Optax's names."""
        shown, rate = self.notes.get("hyperparameters") or {}, self.notes.get("lr")
        return dict(shown) if rate is None else {**shown, "learning_rate": rate}

    def __getitem__(self, stage: str) -> Tensors:
        """Return a stage's tensors, {} if the step does not show it; local ones (replicas, ...).

        Examples of unequal batches are those of one replica: rank 0's come first.
        """
        if stage not in LOCAL:
            return dict(folded(stage, self._files[0].get(stage, {}), self._summands))
        of_ranks = [folded(stage, file.get(stage, {}), self._summands) for file in self._files]
        axis = int(stage == "samples" and len({*self.sizes}) > 1)
        if axis:
            of_ranks = [{name: x.reshape(1, -1, *x.shape[2:]) for name, x in of_rank.items()} for of_rank in of_ranks]
        shapes = [{name: x.shape[axis + 1 :] for name, x in of_rank.items()} for of_rank in of_ranks]
        if any(of_rank != shapes[0] for of_rank in shapes):
            return {}
        return {name: np.concatenate([of_rank[name] for of_rank in of_ranks], axis) for name in of_ranks[0]}

    @property
    def sizes(self) -> list[int]:
        """Numbers of examples, of each replica; [] if no entry of the batch was recorded."""
        samples = [next(iter(file.get("samples", {}).values()), None) for file in self._files]
        return [x.shape[1] for x in samples if x is not None for _ in x]

    @cached_property
    def _files(self) -> list[dict[str, Tensors]]:
        return [part.arrays(self.number) for part in self._parts]


class Recording:
    """A recording of one side.

    Args:
        folder: folder that a `Recorder` has written; that of several machines has the `rank` folders of all.

    Attributes:
        folder: the folder.
        header: first process's description of the run.
        steps: number -> step, for the steps that every process has.
        world_size: number of replicas.
        unfinished: the step within which the recording ends, because its run was killed or continues; None: it ends
            with a whole step of every process.
        left_out: steps, after the last of `steps`, that some processes have finished.
        summands: see `jaxddp.parity.sums`.

    Raises:
        InputError: there is no recording, a process's part is missing, or a file is damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        if not folder.is_dir():
            raise InputError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}")
        parts = self._read()
        self.header = parts[0].header
        self.world_size = sum(part.header["replicas"] for part in parts)
        common = set[int].intersection(*(set(part.lines) for part in parts))
        self.left_out = sorted(set[int].union(*(set(part.lines) for part in parts)) - common)
        if not common:
            raise InputError(f"{folder}: has no step yet")
        if self.left_out and self.left_out[0] < max(common):
            lacking = [part.folder.name for part in parts if self.left_out[0] not in part.lines]
            raise InputError(f"{folder}: damaged: {listed(lacking, joint=', ')} lacks step {self.left_out[0]}")
        ends = [*self.left_out, *(part.unfinished for part in parts if part.unfinished is not None)]
        self.unfinished: int | None = min(ends, default=None)
        self.summands: list[Summand] = []
        self.steps = {number: RecordedStep(number, parts, self.summands) for number in sorted(common)}

    def _read(self) -> list[Part]:
        """Return the parts of all processes."""
        parts = [read_part(self.folder, 0)]
        count = parts[0].header["world_size"]
        for rank in range(1, count):
            if not (rank_folder(self.folder, rank) / LINES).exists():
                raise InputError(f"{self.folder}: rank{rank} of {count} processes is missing; copy it from its machine")
            parts.append(read_part(self.folder, rank))
            for name in ("world_size", "side", "limit"):
                if parts[-1].header[name] != parts[0].header[name]:
                    raise InputError(f"{self.folder}: damaged: {name} differs between rank0 and rank{rank}")
        if rank_folder(self.folder, count).exists():
            raise InputError(f"{self.folder}: damaged: has rank{count}, and {LINES} tells of {count} processes")
        return parts

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
