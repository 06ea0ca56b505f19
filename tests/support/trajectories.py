"""Trajectories of either framework, and the comparison of two trajectories."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.parity.case_interface import LOCAL_STAGES, SHARED_STAGES, AnyCase, Trajectory
from jaxddp.parity.cases import Case, PortCase
from jaxddp.parity.compare.residuals import MOVED, is_real, norm, residuals, rounding_only
from jaxddp.parity.jax_side.recorded_runs import forced_records, free_records
from jaxddp.parity.records import Tensors
from jaxddp.parity.torch_side.pool import TorchPool

Runs = tuple[Trajectory, Trajectory]  # jaxddp's and torch's
STAGES = LOCAL_STAGES + SHARED_STAGES
# Stages of a step that starts from torch's state.
FORCED_STAGES = (*LOCAL_STAGES, "gradients", "clipped_gradients", "update", "buffers")
ROUNDING_ALLOWANCE = 100  # times the tolerance; measured: up to 1.8 times the tolerance of 1e-10


@dataclass(frozen=True)
class Residual:
    """Largest difference of one stage, the step after which it occurs, and its tensor."""

    value: float = 0.0
    step: int = 0
    tensor: str = ""


@dataclass(frozen=True)
class Comparison:
    """Largest residual of every stage, and the first difference beyond the tolerance.

    Attributes:
        tolerance: largest residual that counts as equal.
        worst: stage -> largest residual.
        rounding_only: parameters whose true gradient is zero, and running means -> largest residual (see `compare`).
        first: stage and residual of the first difference; None: no difference.
    """

    tolerance: float
    worst: dict[str, Residual]
    rounding_only: dict[str, float]
    first: tuple[str, Residual] | None

    @property
    def equal(self) -> bool:
        """True if every residual is within the tolerance."""
        return self.first is None

    def __str__(self) -> str:
        worst = "  ".join(f"{stage} {residual.value:.1e}" for stage, residual in self.worst.items())
        if self.first is None:
            return f"equal to {self.tolerance:.0e}: {worst}"
        stage, residual = self.first
        return (
            f"different at step {residual.step} in {stage}, tensor {residual.tensor}: {residual.value:.1e}, "
            f"allowed {self.tolerance:.0e}: {worst}"
        )


def compare(a: Trajectory, b: Trajectory, tolerance: float, stages: tuple[str, ...] = STAGES) -> Comparison:
    """Compare every tensor of every stage after every step.

    A parameter that cannot change the loss, such as a bias in front of BatchNorm, has a gradient that is rounding
    only. Adam divides this gradient by its size: 1e-17 becomes an update of 1e-9 lr, which differs between the
    frameworks and shifts the running mean of the BatchNorm. Such parameters and the running means are listed
    separately, and held to 100 times the tolerance; running variances are not affected.

    Args:
        a, b: trajectories of the same case; b is the reference, whose norms scale the differences.
        tolerance: largest residual that counts as equal.
        stages: stages to compare; all by default.

    Raises:
        ValueError: the trajectories have different steps or tensors.

    >>> import numpy as np
    >>> def run(w):
    ...     return Trajectory({"w": np.zeros(1)}, [{"params": {"w": np.array([w])}, "gradients": {"w": np.ones(1)}}])
    >>> print(compare(run(1.0), run(1.5), tolerance=1e-12, stages=("params",)))
    different at step 1 in params, tensor w: 3.3e-01, allowed 1e-12: params 3.3e-01
    """
    if len(a.records) != len(b.records):
        raise ValueError(f"{len(a.records)} steps against {len(b.records)}")
    noise = rounding_only(a) & rounding_only(b)
    worst = {stage: Residual() for stage in stages}
    noise_worst = dict.fromkeys(sorted(noise), 0.0)  # running means are added below
    first = None
    for step, (record_a, record_b) in enumerate(zip(a.records, b.records, strict=True), start=1):
        for stage in stages:
            start = b.start if stage in ("params", "buffers") else None
            for name, value in residuals(record_a[stage], record_b[stage], start).items():
                allowed = tolerance
                if noise and (name in noise if stage == "params" else name.endswith(MOVED)):
                    noise_worst[name] = max(noise_worst.get(name, 0.0), value)
                    allowed *= ROUNDING_ALLOWANCE
                elif value > worst[stage].value:
                    worst[stage] = Residual(value, step, name)
                if first is None and not value <= allowed:
                    first = (stage, Residual(value, step, name))
    return Comparison(tolerance, worst, noise_worst, first)


def numeric_error(trajectory: Trajectory, truth: Trajectory, stage: str = "params") -> list[float]:
    """Compute the rounding error of a run, ||x - truth|| / ||truth - start||, after each step."""
    errors = []
    for record, true_record in zip(trajectory.records, truth.records, strict=True):
        names = [name for name, value in true_record[stage].items() if is_real(value)]
        error = math.hypot(*(norm(record[stage][name] - true_record[stage][name]) for name in names))
        moved = math.hypot(*(norm(true_record[stage][name] - truth.start[name]) for name in names))
        errors.append(error / moved)
    return errors


def run_jax(case: AnyCase, weights: Tensors, **options: Any) -> Trajectory:
    """Run a case with jaxddp's replica step; options: see `free_records`."""
    return Trajectory(weights, list(free_records(case, weights, **options)))


def run_in_both(case: AnyCase, pool: TorchPool, wrong: AnyCase | None = None, **options: Any) -> Runs:
    """Run a case in jaxddp (`wrong` in its place, if given) and in torch from the same weights; options: of jaxddp."""
    weights = case.initial_weights()
    return run_jax(wrong or case, weights, **options), pool.run(case, weights)


def check_equal(runs: Runs, tolerance: float, stages: tuple[str, ...] = STAGES) -> None:
    """Check that two runs are equal in some stages."""
    comparison = compare(*runs, tolerance, stages)
    assert comparison.equal, comparison


def check_differs(comparison: Comparison, stage: str, least: float, step: int | None = None) -> None:
    """Check that two runs differ first in a stage, at a step if one is given, and there by more than `least`."""
    assert comparison.first is not None and comparison.first[0] == stage, comparison
    assert step in (None, comparison.first[1].step), comparison
    assert comparison.worst[stage].value > least, comparison


def run_forced(case: AnyCase, reference: Trajectory, **options: Any) -> Trajectory:
    """Run every step from the state that the reference had before it; options: see `forced_records`."""
    return Trajectory(reference.start, list(forced_records(case, reference, **options)))


def on_one_replica(case: Case) -> Case:
    """Return the case for one replica, which takes the full batch (see `whole_batch`).

    BatchNorm then covers the full batch, as torch's SyncBatchNorm would, which needs GPUs.
    """
    return dataclasses.replace(case, world_size=1, config=dataclasses.replace(case.config, sync_batch_norm=False))


def whole_batch(batch: MicroBatches) -> MicroBatches:
    """Merge all replicas' examples into one replica's batch; the batch must not be split into micro-batches."""
    if batch.head is not None:
        raise ValueError("a batch in micro-batches cannot become one replica's batch")
    return MicroBatches(None, {name: array.reshape(1, -1, *array.shape[2:]) for name, array in batch.last.items()})


def drawn(case: PortCase) -> Tensors:
    """Return the torch model's initial weights, drawn from the case's seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        state = case.port.torch_model().to(getattr(torch, case.dtype)).state_dict()
    return {name: tensor.detach().numpy().copy() for name, tensor in state.items()}
