"""Hold what a comparison of two recordings finds: residuals by stage and step, and which of them are a difference."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxddp.parity.compare.judge import Located, stage_result
from jaxddp.parity.findings import ORDER, LeftOut, StageResult

# Rounding may tip a ReLU or the maximum of a pool over; measured: gradients that differ by 2e-3 at a step.
TIPPED = 0.05
FAR_LESS = 10.0  # measured: 100
MAY_TIP = ("local_loss", "local_gradients", "gradients", "buffers")
FORWARD = ("local_loss", "buffers")  # which jump only at other parameters, so not at the first step
PADDED = 5000  # steps; of longer runs, tables number the recorded steps


@dataclass
class RecordedJudgement:
    """Result of comparing two recordings.

    Attributes:
        numbers: steps that both have.
        residuals: stage -> per step, tensor -> residual; {} where it is not compared.
        allowed: stage -> largest residual that counts as equal.
        judged: stage -> its steps with equal inputs, each with its largest residual.
        apart: per step, relative difference of the parameters before it; NaN: not known.
        moved: per step, the same relative to how far the parameters have moved since the first; 0 there.
        noise: parameters whose gradients are all rounding, which differ on both sides.
        drift: per step, the largest residual of a parameter before it; NaN: not known.
        same_examples: per step, whether both sides had the same examples in the same places.
        kinked: parameters whose gradients may jump by rounding, since they pass through a ReLU or the like; None: not
            known.
        tips: stage -> steps that differ only in gradients that pass through kinks, and not in all of them.
        direct: step -> residuals of JAX's update against torch's, what is allowed, and why it would not be judged so;
            for the steps where torch's optimizer is replayed.
        left_out: (reason, step) -> stages that are not judged there.
    """

    numbers: list[int]
    residuals: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    allowed: dict[str, float] = field(default_factory=dict)
    judged: dict[str, list[Located]] = field(default_factory=dict)
    apart: list[float] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    noise: frozenset[str] = frozenset()
    drift: list[float] = field(default_factory=list)
    same_examples: list[bool] = field(default_factory=list)
    kinked: frozenset[str] | None = None
    tips: dict[str, list[Located]] = field(default_factory=dict)
    direct: dict[int, tuple[dict[str, float], float, str]] = field(default_factory=dict)
    left_out: dict[tuple[str, int], list[str]] = field(default_factory=dict)

    def leave_out(self, stage: str, step: int, reason: str) -> None:
        """Note that a stage is not judged at a step."""
        self.left_out.setdefault((reason, step), []).append(stage)

    def note(self, stage: str, index: int, of_tensors: Mapping[str, float], allowed: float, judged: bool) -> None:
        """Note a stage's residuals at a step, and whether it differs there.

        Args:
            allowed: largest residual that counts as equal at this step.
            judged: whether the stage's inputs are equal.
        """
        if not of_tensors:
            return
        self.residuals.setdefault(stage, [{} for _ in self.numbers])[index] = dict(of_tensors)
        self.allowed.setdefault(stage, allowed)
        if judged:
            self.judged.setdefault(stage, []).append(Located.worst(self.numbers[index], of_tensors, allowed))

    @property
    def first(self) -> dict[str, Located]:
        """First difference of each stage that differs given its inputs."""
        differing = {stage: _beyond(steps) for stage, steps in self.judged.items() if stage not in self.tipped}
        return {stage: min(steps, key=lambda one: one.step) for stage, steps in differing.items() if steps}

    @property
    def tipped(self) -> dict[str, Located]:
        """Stages that differ a little at less than half of their steps, and far less at the others."""
        found = {}
        for stage, steps in self.judged.items():
            beyond = _beyond(steps)
            from_start = stage in FORWARD and beyond[:1] == steps[:1] and beyond[0].step == self.numbers[0]
            if stage in MAY_TIP and self.kinked != frozenset() and not from_start and 0 < 2 * len(beyond) < len(steps):
                worst = max(beyond, key=lambda one: one.residual)
                others = max(one.residual for one in steps if one not in beyond)
                least = min(one.residual for one in beyond)
                if worst.residual <= TIPPED and FAR_LESS * others <= least:
                    found[stage] = worst
        return found

    def stages_left_out(self) -> tuple[LeftOut, ...]:
        """Return what is not judged, a reason after the other."""
        steps: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        for (reason, step), stages in self.left_out.items():
            steps.setdefault((reason, tuple(sorted(stages, key=ORDER.index))), []).append(step)
        return tuple(LeftOut(stages, tuple(numbers), reason) for (reason, stages), numbers in steps.items())

    def results(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StageResult]:
        """Return the stages in the order of a step, one residual for each step of the run."""
        return {stage: self._result(stage, shapes) for stage in ORDER if stage in self.residuals}

    def _result(self, stage: str, shapes: Mapping[str, tuple[int, ...]]) -> StageResult:
        shown, allowed = self.residuals[stage], self.allowed[stage]
        if not self.first:  # runs that are equal may be far apart by now
            judged = {one.step: one for one in self.judged.get(stage, ())}
            shown = [of_step if n in judged else {} for n, of_step in zip(self.numbers, shown, strict=True)]
            beyond = [one for one in judged.values() if one.residual > allowed]
            allowed = max([allowed, *(TIPPED if one.residual > one.allowed else one.allowed for one in beyond)])
        result = stage_result(shown, allowed, shapes)
        return replace(result, residuals=self.by_step(result.residuals))

    def by_step(self, values: Sequence[float]) -> tuple[float, ...]:
        """Return one value for each step of the run, NaN for those that are not recorded; of a long run, as given."""
        if self.numbers[-1] > PADDED:
            return tuple(values)
        known = dict(zip(self.numbers, values, strict=True))
        return tuple(known.get(number, math.nan) for number in range(1, self.numbers[-1] + 1))


def _beyond(steps: Sequence[Located]) -> list[Located]:
    return [one for one in steps if not one.residual <= one.allowed]
