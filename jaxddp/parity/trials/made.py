"""A made run: records whose weights and gradients are those of variants, by which both sides are forced."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxddp.parity.case_interface import Trajectory
from jaxddp.parity.compare.clipping import NOT_CLIPPED, Clipping
from jaxddp.parity.port.variants import Variant
from jaxddp.parity.records import RecordWriter, Tensors, full, stage_norm
from jaxddp.parity.torch_side.pool import torch_records
from jaxddp.parity.torch_side.rank import rank_folder


class MadeRun:
    """Starts and gradients of variants, made from a run of the reference.

    Args:
        run: torch's run.
        variants: one per step of the made run.
        clipping: how the reference clips gradients that the port's optimizer clips itself.
        gives_gradients: both sides' optimizers are given gradients; else each gets its own.
    """

    def __init__(self, run: Trajectory, variants: Sequence[Variant], clipping: Clipping, gives_gradients: bool):
        self._run, self._variants = run, variants
        self._clipping, self._gives_gradients = clipping, gives_gradients
        self._trained = run.records[0]["params"].keys()
        self._tied = tied(run.start, self._trained, run.records[0]["buffers"])

    def start(self, number: int = 0) -> dict[str, np.ndarray]:
        """Return the parameters and buffers before a step, counted from 0."""
        variant = self._variants[number]
        before = self._run.before(variant.step % len(self._run.records))
        moved = {name for name in before if before[name].dtype.kind == "f"} & {*self._trained, *self._tied}
        return {name: before[name] * variant.weights if name in moved else before[name] for name in before}

    def write(self, folder: Path, world_size: int) -> None:
        """Write the records of all ranks."""
        writers = [RecordWriter(rank_folder(folder, rank)) for rank in range(world_size)]
        for number, variant in enumerate(self._variants):
            following = self.start(min(number + 1, len(self._variants) - 1))
            record = self._run.records[variant.step % len(self._run.records)]
            params = {name: following[name] for name in self._trained}
            shared = {"params": params, "buffers": {name: following[name] for name in record["buffers"]}}
            shared |= self._gradients(record, variant) if self._gives_gradients else {}
            for rank, writer in enumerate(writers):
                losses = {name: x[rank] for name, x in record["local_loss"].items()}
                writer.write({"local_loss": losses, **(shared if rank == 0 else {})})

    def slack(self, number: int, factor: float = 1.0) -> float:
        """Return by how much updates may differ as one side clips without torch's epsilon.

        Args:
            number: step, from 0.
            factor: of its gradients.
        """
        variant = self._variants[number]
        record = self._run.records[variant.step % len(self._run.records)]
        return self._clipping.slack(factor * stage_norm(self._gradients(record, variant)["gradients"]))

    def _gradients(self, record: Mapping[str, Tensors], variant: Variant) -> dict[str, Tensors]:
        own = "clipped_gradients" if self._clipping == NOT_CLIPPED else "gradients"
        gradients = {name: x * variant.gradients for name, x in full(record, own).items()}
        if variant.spike is not None:
            gradients = _with_spike(gradients, variant.spike)
        return {"gradients": gradients, "clipped_gradients": self._clipping.clip(gradients)}


def tied(start: Mapping[str, np.ndarray], params: Collection[str], buffers: Collection[str]) -> set[str]:
    """Return the names in a state_dict that are further ones of a parameter.

    >>> start = {"embed": np.ones(2), "head": np.ones(2), "mean": np.zeros(2), "table": np.ones(2)}
    >>> tied(start, ["embed", "mean"], ["table"])
    {'head'}
    """
    others = [name for name in start if name not in params and name not in buffers]
    return {name for name in others if any(np.array_equal(start[name], start[twin]) for twin in params)}


def _with_spike(gradients: Tensors, size: float) -> Tensors:
    """Replace the middle element of the largest gradient by so many times the largest element of all.

    >>> _with_spike({"b": np.ones(1), "w": np.array([1.0, -2.0, 0.0])}, 1e6)["w"]
    array([1.e+00, 2.e+06, 0.e+00])
    """
    name = max(gradients, key=lambda name: gradients[name].size)
    changed = gradients[name].copy()
    changed.reshape(-1)[changed.size // 2] = size * max(np.abs(x).max(initial=0.0) for x in gradients.values())
    return {**gradients, name: changed}


def raw_run(folder: Path, start: Mapping[str, np.ndarray], world_size: int) -> Trajectory:
    """Return a run of torch with all tensors as torch has them."""
    return Trajectory(start, torch_records(folder, world_size))
