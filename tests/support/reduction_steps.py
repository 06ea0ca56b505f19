"""Torch's reduction of a step written in loops, with faults, and the steps of a run of it."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxddp.parity.compare.clipping import Clipping
from jaxddp.parity.diagnosis.micro_batches import ALL, MICRO_BATCH, RANK
from jaxddp.parity.diagnosis.reduction.reduction_causes import SHOWN, ReductionRecipe, ReductionStep

RANKS, PIECES = 4, 3
SHAPES = {"fc.weight": (3, 2), "fc.bias": (2,), "out.weight": (2, 3), "out.bias": (5,)}
OVER = {"ddp": MICRO_BATCH, "rank": RANK, "global": ALL}
CLIPPED = ReductionRecipe(clipping=Clipping(0.5))
RIGHT = 2e-15  # of the stage's norm, left by the right name; measured: up to 2e-16

Tensors = dict[str, np.ndarray]
Stages = dict[str, list[Tensors]]


class Step:
    """Torch's step in loops: each method is a place where a port can be wrong."""

    norm = 0.5
    normalization = "ddp"

    def take(self, counts: np.ndarray, sums: list[list[Tensors]], stale: list[list[Tensors]]) -> Stages:
        local = [self.local(counts, sums, rank) for rank in range(RANKS)]
        gradients = self.reduced(local)
        clipped = [self.clipped(gradients[rank], local[rank]) for rank in range(RANKS)]
        return {"local_gradients": local, "gradients": gradients, "clipped_gradients": clipped}

    def local(self, counts: np.ndarray, sums: list[list[Tensors]], rank: int) -> Tensors:
        return total(scaled(sums[rank][piece], 1 / self.divisor(counts, rank, piece)) for piece in range(PIECES))

    def divisor(self, counts: np.ndarray, rank: int, piece: int) -> float:
        if self.normalization == "global":
            return counts.sum() / RANKS
        return counts[rank, piece] * PIECES

    def reduced(self, local: list[Tensors]) -> list[Tensors]:
        return [scaled(total(local), 1 / RANKS)] * RANKS

    def clipped(self, gradients: Tensors, local: Tensors) -> Tensors:
        return scaled(gradients, min(1.0, self.norm / (length(gradients) + 1e-6)))


def total(many: Iterable[Tensors]) -> Tensors:
    many = list(many)
    return {name: sum(tensors[name] for tensors in many) for name in many[0]}  # type: ignore[misc]


def scaled(tensors: Tensors, factor: float) -> Tensors:
    return {name: value * factor for name, value in tensors.items()}


def length(tensors: Tensors) -> float:
    return float(np.sqrt(sum((value**2).sum() for value in tensors.values())))


def faulty(**methods: Any) -> type[Step]:
    """Return torch's step with other methods, or another normalization."""
    return type("Faulty", (Step,), methods)


def clipped_by(norm: Callable[[Tensors, Tensors], float], epsilon: float = 1e-6) -> type[Step]:
    """Return a step that clips by another norm of (gradients, local gradients)."""
    return faulty(
        clipped=lambda self, gradients, local: scaled(
            gradients, min(1.0, self.norm / (norm(gradients, local) + epsilon))
        )
    )


def half_precision(self: Step, local: list[Tensors]) -> list[Tensors]:
    halves = [{name: x.astype("float16").astype("float32") for name, x in of_rank.items()} for of_rank in local]
    return [{name: x.astype("float64") / RANKS for name, x in total(halves).items()}] * RANKS


def aliased(self: Step, local: list[Tensors]) -> list[Tensors]:
    right = Step.reduced(self, local)[0]
    return [{**right, "out.weight": right["fc.weight"].reshape(2, 3)}] * RANKS


def without_biases(self: Step, local: list[Tensors]) -> list[Tensors]:
    right = Step.reduced(self, local)[0]
    return [{name: own[name] if "bias" in name else x for name, x in right.items()} for own in local]


Global = faulty(normalization="global")
Sum = faulty(reduced=lambda self, local: [total(local)] * RANKS)
Twice = faulty(reduced=lambda self, local: [scaled(total(local), 1 / RANKS**2)] * RANKS)
NotDivided = faulty(divisor=lambda self, counts, rank, piece: counts[rank, piece])
MeanPerRank = faulty(divisor=lambda self, counts, rank, piece: counts[rank].sum())
NoEpsilon = clipped_by(lambda gradients, local: length(gradients), epsilon=0.0)
NormOfRank = clipped_by(lambda gradients, local: length(local))
LastPiece = faulty(local=lambda self, counts, sums, rank: scaled(sums[rank][-1], 1 / counts[rank, -1]))
ByTensor = faulty(
    clipped=lambda self, gradients, local: {
        name: Step.clipped(self, {name: x}, local)[name] for name, x in gradients.items()
    }
)
FAULTS: dict[str, tuple[type[Step], set[str]]] = {
    "LastPiece": (LastPiece, {"micro_batches_lost"}),
    "ByTensor": (ByTensor, {"clip_norm"}),
    "Sum": (Sum, {"sum_not_mean", "check_vma"}),
    "NoSync": (faulty(reduced=lambda self, local: local), {"no_sync", "collective_in_loss"}),
    "Twice": (Twice, {"averaged_twice"}),
    "Hosts": (
        faulty(reduced=lambda self, local: [scaled(total(local), 1 / 2)] * RANKS),
        {"local_device_count"},
    ),  # of two
    "SummedByItself": (
        faulty(
            local=lambda self, counts, sums, _: total(Step.local(self, counts, sums, rank) for rank in range(RANKS))
        ),
        {"check_vma"},
    ),
    "NotDivided": (NotDivided, {"accumulation_not_divided"}),
    "MeanPerRank": (MeanPerRank, {"mean_per_rank"}),
    "Global": (Global, {"global_mean"}),
    "Stale": (
        faulty(take=lambda self, counts, sums, stale: Step.take(self, counts, stale, stale)),
        {"stale_parameters"},
    ),
    "ClippedFirst": (
        faulty(
            reduced=lambda self, local: Step.reduced(self, [Step.clipped(self, of_rank, of_rank) for of_rank in local]),
            clipped=lambda self, gradients, local: gradients,
        ),
        {"clipped_before_mean"},
    ),
    "NormOfRank": (NormOfRank, {"clip_norm_local"}),
    "NormReducedTwice": (clipped_by(lambda gradients, local: RANKS**0.5 * length(gradients)), {"clip_norm_local"}),
    "NoEpsilon": (NoEpsilon, {"clip_epsilon"}),
    "CountsTied": (
        clipped_by(lambda gradients, local: length({**gradients, "again": gradients["out.weight"]})),
        {"tied_weights"},
    ),
    "Aliased": (faulty(reduced=aliased), {"aliased_buffers"}),
    "BiasesNotAveraged": (faulty(reduced=without_biases), {"no_sync"}),
    "HalfPrecision": (faulty(reduced=half_precision), {"compressed_all_reduce"}),
}


def drawn(rng: np.random.Generator) -> list[list[Tensors]]:
    return [
        [{name: 5 * rng.normal(size=shape) for name, shape in SHAPES.items()} for _ in range(PIECES)]
        for _ in range(RANKS)
    ]


def stacked(many: list[Tensors]) -> Tensors:
    return {name: np.stack([tensors[name] for tensors in many]) for name in many[0]}


def steps_of(port: Step, *shown: str, steps: int = 3, seed: int = 0) -> list[ReductionStep]:
    """Return the steps of a run of the port; the gradients are clipped at some steps and not at others."""
    rng = np.random.default_rng(seed)
    taken, before = [], None
    for number in range(steps):
        counts = rng.integers(1, 9, (RANKS, PIECES)).astype(float)
        sums = drawn(rng)
        port.norm = 1e3 if number == 1 else 0.5
        stages = port.take(counts, sums, before or sums)
        together = stacked([stacked(of_rank) for of_rank in sums])
        stale = None if before is None else stacked([stacked(of_rank) for of_rank in before])
        of_shown = {stage: stacked(stages[stage]) for stage in shown or SHOWN}
        taken.append(ReductionStep(counts, together, stale, of_shown))
        before = sums
    return taken


def active(steps: list[ReductionStep]) -> list[ReductionStep]:
    """Return the steps with the largest norm 0.5, since a recipe has one largest norm for all steps."""
    return [step for number, step in enumerate(steps) if number != 1]
