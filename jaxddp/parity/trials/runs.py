"""Run both sides through variants of a run's steps, and judge every stage."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from jaxddp.parity.cases import PortCase
from jaxddp.parity.compare.clipping import NOT_CLIPPED, reference_clipping
from jaxddp.parity.compare.judge import Judgement, Located, judge
from jaxddp.parity.compare.residuals import ROUNDING, largest_shares, residuals
from jaxddp.parity.coverage import Trial
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.findings import ORDER
from jaxddp.parity.jax_side.child import Forced, jax_records
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.port import Facts
from jaxddp.parity.port.variants import Variant, scaled_by_batch
from jaxddp.parity.records import Record, StoredRecord, stage_norm
from jaxddp.parity.runs import Runs
from jaxddp.parity.torch_side.pool import torch_records
from jaxddp.parity.torch_side.rank import rank_folder
from jaxddp.parity.torch_side.steps import Steps
from jaxddp.parity.trials.made import MadeRun, raw_run
from jaxddp.parity.workers import Workers

SLIGHT = 1e-9  # largest residual that may be rounding
ROOM = 100  # times torch's distance from its step in float32, scaled to float64; measured for log(1 - tanh^2): 23
OF_GRADIENTS = 1e-14  # error of an element of gradients, relative to the norm of all; measured: 1e-17
OF_MODEL = ("weights", "batch")  # kinds of trials that change what the loss is given


@dataclass(frozen=True)
class Tried:
    """A variant that both sides took.

    Attributes:
        variant: the variant.
        trial: the trial, with why it is left out if it is.
        differing: stage -> where it differs, in the order of the stages.
        place: number of the variant in its run, from 0.
        variants: variants of that run.
        factor: factor of jax's values to torch's in the first stage that differs, if it is one; see `sizes`.
        sizes, count: `batch_sizes` of the trial, and its number of replicas, where these are other than the run's.
    """

    variant: Variant
    trial: Trial
    differing: dict[str, Located]
    place: int
    variants: tuple[Variant, ...]
    factor: float = math.nan
    sizes: Mapping[int, str] = field(default_factory=dict)
    count: int = 0

    @property
    def is_slight(self) -> bool:
        """Return whether something differs, and by no more than rounding may."""
        return bool(self.differing) and all(located.residual <= SLIGHT for located in self.differing.values())


class TrialRuns:
    """Runs of both sides through variants, each step from the weights of its variant.

    Args:
        runs: the run's records.
        workers: processes in which the sides run.

    Attributes:
        runs, workers: as above.
        case: the run's case.
    """

    def __init__(self, runs: Runs, workers: Workers):
        assert isinstance(runs.case, PortCase), "jaxddp's own models have no trials"
        self.runs, self.workers, self.case = runs, workers, runs.case
        self._numbers = itertools.count()

    def tried(self, variants: Sequence[Variant]) -> Iterator[Tried]:
        """Yield each trial with what differs in it; one whose loss raises is left out.

        Raises:
            ChildError: a side fails.
        """
        # The optimizer of a `jax_step` gets the gradients of the step's own loss.
        scales = self.runs.facts.custom_step and any(variant.gradients != 1 for variant in variants)
        left = tuple(replace(variant, scales_loss=scales) for variant in variants)
        while left:
            made = self.made_run(left)
            torch, jax, why = self._take(made, left)
            count = len(torch)
            judgement = judge(torch, jax, self.runs.facts, self.runs.summary.optimizer, self.runs.summary.highest)
            trial: Trial | None = None
            slack = 0.0
            for place, variant in enumerate(left[:count]):
                trial = variant.trial or trial  # a step as it is shows what the optimizer remembers
                slack = max(slack, made.slack(place), self.slack(torch[place]))
                if trial is not None:
                    tried = judged(
                        Tried(variant, trial, {}, place, left), judgement, torch, jax, self.runs.facts, slack
                    )
                    yield self._but_for_rounding(tried, made, torch[place]) if tried.is_slight else tried
            if not why:
                return
            if (raising := left[count].trial) is not None:
                yield Tried(left[count], replace(raising, left_out=why), {}, count, left)
            left = left[count + 1 :]

    def _but_for_rounding(self, tried: Tried, made: MadeRun, torch: Record) -> Tried:
        """Return a trial without the stages that differ by no more than torch itself rounds in its way.

        Its distance from its own step in float32 shows how far: a loss such as log(1 - tanh(x)**2) loses digits.
        """
        records, _ = self._torch(made, tried.variants, "float32")
        if tried.place >= len(records):  # its loss raises only in float32
            return tried
        rounded = records[tried.place]
        share = ROOM * float(np.finfo(np.float64).eps / np.finfo(np.float32).eps)
        further = {stage: share * max(residuals(rounded[stage], torch[stage]).values()) for stage in tried.differing}
        kept = {stage: x for stage, x in tried.differing.items() if not x.residual <= x.allowed + further[stage]}
        return replace(tried, differing=kept)

    def made_run(self, variants: Sequence[Variant], gives_gradients: bool = False) -> MadeRun:
        """Return the made run of variants; `gives_gradients`: also where a `jax_step` does not take them."""
        facts, run = self.runs.facts, raw_run(self.runs.path("torch64"), self.runs.start, self.case.world_size)
        clipping = reference_clipping(facts) if facts.clips_inside else NOT_CLIPPED
        return MadeRun(run, variants, clipping, gives_gradients or not facts.custom_step)

    def slack(self, torch: Record) -> float:
        """Return by how much an update of a record's own gradients may differ; see `Clipping.slack`."""
        facts = self.runs.facts
        return reference_clipping(facts).slack(stage_norm(torch["gradients"])) if facts.clips_inside else 0.0

    def _case(self, variants: tuple[Variant, ...]) -> PortCase:
        source = self.case.source
        source = scaled_by_batch(source) if variants[0].scales_loss else source
        return replace(self.case, source=source, variants=variants)

    def folders(self) -> tuple[Path, Path, Path]:
        """Return new folders: of a made run, of torch's records and of jax's."""
        number = next(self._numbers)
        made, torch, jax = (self.runs.path(f"trial{number} {name}") for name in ("made", "torch", "jax"))
        return made, torch, jax

    def evidence(self, tried: Tried) -> Evidence:
        """Return the evidence on a variant: torch takes it freely, and jax each step from torch's state.

        Raises:
            ChildError: a side fails.
        """
        of_model = tried.trial.kind in OF_MODEL
        variants = (tried.variant,) if of_model else tried.variants[: tried.place + 1]
        made, of_torch, of_jax = self.folders()
        case, run = self._case(variants), self.made_run(variants)
        start, sizes = run.start(), (case.world_size, case.steps)
        run.write(made, 1)
        given = None if of_model or self.runs.facts.custom_step else rank_folder(made, 0)
        steps = Steps(case.torch_source, "float64", *sizes, of_torch, start, given=given, variants=variants)
        self.workers.torch.do(steps)
        self.workers.jax.do(Forced(case, start, of_torch, of_jax))
        return self._evidence(case, start, of_torch, of_jax)

    def _evidence(self, case: PortCase, start: Arrays, of_torch: Path, of_jax: Path) -> Evidence:
        facts, summary, summands = self.runs.facts, self.runs.summary, self.runs.summands
        records = torch_records(of_torch, case.world_size, summands=summands), jax_records(of_jax)
        judgement = judge(*records, facts, summary.optimizer, summary.highest)
        return Evidence(case, facts, summary, start, *records, of_torch, of_jax, judgement, summands)

    def _take(
        self, run: MadeRun, variants: tuple[Variant, ...]
    ) -> tuple[Sequence[StoredRecord], Sequence[StoredRecord], str]:
        """Let both sides take variants; return their records, and why torch ended before the last variant."""
        made, _, of_jax = self.folders()
        run.write(made, self.case.world_size)
        self.workers.jax.start(Forced(self._case(variants), run.start(), made, of_jax))
        try:
            torch, why = self._torch(run, variants)
        finally:
            self.workers.jax.wait()
        return torch, jax_records(of_jax), why

    def _torch(
        self, run: MadeRun, variants: tuple[Variant, ...], dtype: str = "float64"
    ) -> tuple[Sequence[StoredRecord], str]:
        """Let torch take variants; return its records, and why it ended before the last one."""
        made, of_torch, _ = self.folders()
        case = self._case(variants)
        run.write(made, case.world_size)
        ranks, sizes = [rank_folder(made, rank) for rank in range(case.world_size)], (case.world_size, case.steps)
        steps = Steps(case.torch_source, dtype, *sizes, of_torch, run.start(), reference=ranks, variants=variants)
        raised = [summary.raised for summary in self.workers.torch.do(steps) if summary.raised]
        return torch_records(of_torch, case.world_size, summands=self.runs.summands), next(iter(raised), "")


def judged(
    tried: Tried,
    judgement: Judgement,
    torch: Sequence[StoredRecord],
    jax: Sequence[StoredRecord],
    facts: Facts,
    slack: float = 0.0,
) -> Tried:
    """Return a variant with the stages that differ in it, or with why they cannot be compared.

    Args:
        tried: the variant.
        judgement, torch, jax: of its run.
        facts: facts about the training loop.
        slack: by how much its update and the optimizer's state may differ further.
    """
    differing: dict[str, Located] = {}
    for stage in ORDER:
        of_steps = judgement.given.get(stage) or judgement.residuals.get(stage, [])
        if tried.place >= len(of_steps) or not (of_step := of_steps[tried.place]):
            continue
        allowed = judgement.allowed(stage, tried.place + 1)
        further = slack if stage in ("update", "optimizer_state") else 0.0
        if stage == "update" and facts.custom_step and max(of_step.values()) > allowed + further:
            of_step = without_noise(torch[: tried.place + 1], jax[tried.place], judgement.shares[tried.place])
        located = Located.worst(tried.place + 1, of_step, allowed)
        if located.residual <= located.allowed + further:
            continue
        of_torch, of_jax = _is_finite(torch[tried.place], stage), _is_finite(jax[tried.place], stage)
        if tried.variant.weights == 0 and of_torch == of_jax:
            continue  # either way of breaking a tie is right
        is_nan = math.isnan(tried.variant.spike or 0.0)
        if is_nan and not (of_torch or of_jax):
            continue  # as it should be
        if not (of_torch and of_jax) and not (is_nan and of_jax):  # an optimizer of jax's that hides NaN differs
            sides = "either side" if of_torch == of_jax else "jax" if of_torch else "torch"
            verb = "is" if stage in ("local_loss", "update", "optimizer_state") else "are"
            why = f"the {stage.replace('_', ' ')} {verb} not finite in {sides}".replace("in either", "on either")
            return replace(tried, trial=replace(tried.trial, left_out=why))
        differing[stage] = located
    return replace(tried, differing=differing)


def without_noise(torch: Sequence[Record], jax: Record, shares: Mapping[str, float]) -> dict[str, float]:
    """Return the residuals of the update of a `jax_step`, whose optimizer gets its own gradients.

    Adam and its relatives divide a gradient by its own size, so an element's update has the relative error of its
    gradient. Elements whose gradients are only rounding, as those of a bias of attention's keys, are left out.

    Args:
        torch: records of the steps up to this one.
        jax: record of this step.
        shares: see `jaxddp.parity.compare.judge.rate_in_float32`.
    """
    sizes = largest_shares([record["gradients"] for record in torch])
    expected = {name: shares.get(name, 1.0) * x for name, x in torch[-1]["update"].items()}
    kept = dict(jax["update"])
    for name in expected.keys() & sizes.keys():
        size = np.maximum(sizes[name], ROUNDING)
        error = np.where(size == ROUNDING, np.inf, np.abs(expected[name]) * OF_GRADIENTS / size)
        kept[name] = np.where(np.abs(kept[name] - expected[name]) <= error, expected[name], kept[name])
    return residuals(kept, expected)


def _is_finite(record: Record, stage: str) -> bool:
    return all(bool(np.isfinite(x).all()) for x in record.get(stage, {}).values() if x.dtype.kind == "f")
