"""Names of causes that need no replay of the loss: only this module runs searches of `jaxddp.parity.diagnosis`."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxddp.parity.compare.clipping import Clipping
from jaxddp.parity.compare.residuals import norm
from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.diagnosis.optimizer.update_causes import (
    OptimizerEvidence,
    OptimizerStep,
    explain_optimizer,
    reference_program,
    reference_residuals,
)
from jaxddp.parity.diagnosis.optimizer.update_evidence import by_part
from jaxddp.parity.diagnosis.reduction.faults import wrong_means
from jaxddp.parity.diagnosis.reduction.reduction_causes import (
    ReductionRecipe,
    ReductionStep,
    explain_received,
    explain_reduction,
)
from jaxddp.parity.diagnosis.samples import SampleEvidence, explain_samples
from jaxddp.parity.diagnosis.search.decide import Hypothesis, Ruling, decide
from jaxddp.parity.diagnosis.search.fit import IMPOSSIBLE
from jaxddp.parity.findings import Cause
from jaxddp.parity.recordings.aligned import Alignment, total_norm
from jaxddp.parity.recordings.clipping_rule import CLOSE, ratio
from jaxddp.parity.recordings.judge import coarseness
from jaxddp.parity.recordings.outside import OutsideChanges
from jaxddp.parity.recordings.run import RecordedStep, Recording
from jaxddp.parity.recordings.samples import Numbers, sizes_of
from jaxddp.parity.records import Tensors, scaled_by, stage_norm

# What an optimizer in one precision leaves of a replay in float64, in units of that precision; measured: up to 4.
OPTIMIZER_ROUNDING = 8.0
# Bias corrections 1 - b^t lose precision where b is near 1, by this over 1 - b; measured: 0.1 in Optax's Adam. A value
# that is fitted gets few digits only if these leave a tenth.
BIAS_ROUNDING = 1.0
REDUCTION_ROUNDING = 100.0  # of a mean over replicas, in units of the precision; measured: up to 2
COARSEST = 1e-3  # rounding of updates beyond which they support no name
STEPS = 5  # steps on which a reduction is tried
ENOUGH = 10  # elements, of which a multiple of the weights is no chance
# Mistakes in torch's own reduction, and what puts them right.
TORCH_FIXES = {
    "no_sync": "wrap the model in torch.nn.parallel.DistributedDataParallel, call the wrapped one, and leave "
    "model.no_sync() for the last micro-batch",
    "synchronised_early": "put the forward and backward passes of all micro-batches but the last under "
    "model.no_sync(), and those of the last one outside of it",
    "sum_not_mean": "divide by the number of ranks, like DistributedDataParallel and dist.ReduceOp.AVG",
    "averaged_twice": "divide by the number of ranks once; DistributedDataParallel does so by itself",
}
EARLY = Deviation("synchronised_early", Statement("some_not_averaged"))


@dataclass(frozen=True)
class Updates:
    """JAX's updates against the reference's optimizer, given JAX's own gradients and parameters.

    Attributes:
        residuals: per step, tensor -> residual; None: torch's optimizer cannot be replayed.
        floor: the largest residual that counts as rounding.
        ruling: names of the mistakes.
    """

    residuals: list[dict[str, float]] | None
    floor: float
    ruling: Ruling

    @property
    def differ(self) -> bool:
        """Return whether an update differs by more than rounding."""
        return any(not value <= self.floor for of_step in self.residuals or () for value in of_step.values())


def of_updates(
    outside: OutsideChanges, clipping: Clipping, numbers: Sequence[int], rates: Sequence[float] | None = None
) -> Updates:
    """Compare JAX's updates with those of torch's optimizer, and name the mistake that explains a difference.

    Args:
        outside: both recordings, with the parameters and updates of JAX's steps.
        clipping: how torch clips.
        numbers: steps, from the first on without a gap; at all of them JAX shows its gradients.
        rates: learning rates to put in place of torch's, those of other groups in proportion; None: torch's.
    """
    torch_run, jax_run = outside.torch_run, outside.jax_run
    torch, jax = ([run.steps[number] for number in numbers] for run in (torch_run, jax_run))
    pairs = [*zip(torch, jax, strict=True)]
    steps = [_optimizer_step(of_torch, of_jax, outside, clipping) for of_torch, of_jax in pairs]
    rounding, floor = rounding_of_updates(torch, jax, jax_run.epsilon)
    rounding = [coarse + outside.carried(step.number) for coarse, step in zip(rounding, jax, strict=True)]
    floor += max(rounding)
    evidence = evidence_of(torch_run, torch, steps, rounding)
    if not any(step["clipped_gradients"] for step in jax):
        evidence = replace(evidence, clipping=clipping)
    if rates is not None:
        steps = [_with_rate(*item) for item in zip(steps, evidence.rates, rates, strict=True)]
        evidence = replace(evidence, steps=steps, rates=[*rates])
    updates = Updates(replay(evidence, torch_run), floor, Ruling((), None))
    if not updates.differ:
        return updates
    is_coarse = floor > COARSEST
    ruling = Ruling((), None, cut_short=True) if is_coarse else _simplest_first(explain_optimizer(evidence, floor))
    return replace(updates, ruling=ruling)


def _simplest_first(ruling: Ruling) -> Ruling:
    """Order the hypotheses that a run cannot tell apart: something is missing, an option differs, gradients do.

    Float32 tells little apart: if a decay is missing, one that hardly acts explains the updates as well. Gradients
    other than JAX's come last, because those that the optimizer got are recorded.
    """
    order = tuple(sorted(ruling.named, key=lambda one: (not one.removes, "loss_scale" in one.faults)))
    return replace(ruling, named=order)


def evidence_of(
    run: Recording, torch: Sequence[RecordedStep], steps: Sequence[OptimizerStep], rounding: Sequence[float]
) -> OptimizerEvidence:
    """Return what some of torch's steps show of its optimizer, in addition to the inputs and updates of either side."""
    kind, micro_batches = str(run.header["optimizer"]), int(torch[0].notes["micro_batches"])
    rates, sizes = [float(step.notes["groups"][0]["lr"]) for step in torch], sizes_of(torch[0], run.world_size)
    return OptimizerEvidence(kind, steps, rates, run.world_size, micro_batches, None, rounding=rounding, sizes=sizes)


def replay(evidence: OptimizerEvidence, run: Recording) -> list[dict[str, float]] | None:
    """Return residuals like `reference_residuals`; None, too, if excerpts do not tell what the optimizer does."""
    try:
        program = reference_program(evidence)
        is_excerpt = any(math.prod(shape) > run.limit for shape in run.shapes.values())
        if program is None or (is_excerpt and not program.step.elementwise):
            return None
        return reference_residuals(evidence)
    except IMPOSSIBLE:  # torch has no such optimizer, or none with such options
        return None


def rounding_of_updates(
    torch: Sequence[RecordedStep], shown: Sequence[RecordedStep], epsilon: float
) -> tuple[list[float], float]:
    """Return the rounding of each step's update, and the largest residual that a replay leaves in addition to it.

    Args:
        torch: torch's steps.
        shown: the steps whose updates are replayed.
        epsilon: their precision.
    """
    rounding = [epsilon * coarseness(step) for step in shown]
    betas = [beta for step in torch for group in step.notes["groups"] for beta in np.ravel(group.get("betas", ()))]
    lost = BIAS_ROUNDING / max(1 - max(betas, default=0.0), 1e-6) if betas else 0.0
    return rounding, epsilon * (OPTIMIZER_ROUNDING + lost)


def _optimizer_step(
    torch: RecordedStep, jax: RecordedStep, outside: OutsideChanges, clipping: Clipping
) -> OptimizerStep:
    alignment = outside.alignment
    update, params = outside.update(jax.number), outside.params(jax.number)
    stage = "clipped_gradients" if jax["clipped_gradients"] else "gradients"
    gradients, norm, share = alignment.of_jax(jax[stage]), total_norm(jax, stage), 1.0
    if stage == "gradients":
        share = float(clipping.factor(norm))
        gradients = {name: share * x for name, x in gradients.items()}
    names = [name for name in update if name in params]
    groups = [{**group, "names": [name for name in group["names"] if name in names]} for group in torch.notes["groups"]]
    given = torch["clipped_gradients"] or torch["gradients"]
    return OptimizerStep(
        groups,
        as_float({name: params[name] for name in names}),
        as_float(gradients),
        frozenset(name for name in names if name not in given),
        as_float({name: update[name] for name in names}),
        by_part(alignment.states_of_jax(jax["optimizer_state"])),
        share,
        share * norm,
    )


def _with_rate(step: OptimizerStep, rate: float, other: float) -> OptimizerStep:
    """Return a step with another learning rate of the first group, and of the other groups in proportion."""
    ratio = other / rate if rate else 1.0
    groups = [{**group, "lr": group["lr"] * ratio if rate else other} for group in step.groups]
    return replace(step, groups=groups)


def of_samples(examples: tuple[Numbers, Numbers]) -> Ruling:
    """Name the mistake of a sampler or loader."""
    return explain_samples(SampleEvidence(*examples))


def of_reduction(jax: Sequence[RecordedStep], epsilon: float) -> tuple[float, Ruling]:
    """Compare JAX's gradients with the mean of JAX's local gradients, and name the mistake.

    Returns:
        The largest residual of a mean, and the names.
    """
    steps = [_reduction_step(step) for step in jax[:STEPS]]
    floor = REDUCTION_ROUNDING * epsilon
    recipe = ReductionRecipe()
    worst = 0.0
    for step in steps:
        right, shown = recipe.predict(step)["gradients"], step.shown["gradients"]
        apart = stage_norm({name: right[name] - x for name, x in shown.items()})
        worst = max(worst, apart / (stage_norm(dict(right)) or 1.0))
    return worst, (explain_reduction(steps, recipe, floor=floor) if worst > floor else Ruling((), None))


def of_torch_reduction(torch: Sequence[RecordedStep], epsilon: float) -> Cause | None:
    """Return the mistake in torch's own reduction, which its local gradients show; None: there is none, or no name."""
    shown = [step for step in torch[:STEPS] if step["local_gradients"] and step["gradients"]]
    worst, ruling = of_reduction(shown, epsilon) if shown else (0.0, Ruling((), None))
    floor = REDUCTION_ROUNDING * epsilon
    if worst <= floor:
        return None
    named = [one for one in ruling.named if len(one.faults) == 1 and one.faults[0] in TORCH_FIXES]
    replicas = len(next(iter(shown[0]["local_gradients"].values())))
    given = [ratio(*_both(_means(step, "local_gradients"), step["clipped_gradients"])) for step in shown]
    if None not in given:  # averaged, or summed, between the backward pass and the optimizer
        is_sum = all(factor and math.isclose(factor, replicas, rel_tol=CLOSE) for factor in given)
        named = [Hypothesis((wrong_means(replicas)[0][0],), CLOSE)] if is_sum else []
    elif not named and int(shown[0].notes["micro_batches"]) > 1:
        means = [_both(_means(step, "local_gradients"), _means(step, "replica_gradients")) for step in shown]
        residual = max(
            stage_norm({n: x - of[n] for n, x in right.items()}) / (stage_norm(right) or 1.0) for right, of in means
        )
        named = [Hypothesis((EARLY,), residual)] if residual <= floor else []
    if not named:
        return None
    (deviation,), left = named[0].deviations, named[0].residual
    measured = f"torch's gradients are {worst:.2g} off the mean of its local gradients, and {left:.1g} off this"
    in_torch = replace(deviation, what=deviation.what.but(side="torch"), fix=TORCH_FIXES[deviation.kind])
    return Cause((in_torch,), left, measured=measured)


def _means(step: RecordedStep, stage: str) -> dict[str, np.ndarray]:
    """Return the means over the ranks."""
    return {name: x.mean(0, dtype=float) for name, x in step[stage].items()}


def _both(one: Tensors, other: Tensors) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the tensors that two stages have in common, in the same order."""
    names = [name for name in one if name in other]
    return {name: one[name] for name in names}, {name: other[name] for name in names}


def _reduction_step(step: RecordedStep) -> ReductionStep:
    local, gradients = _both(step["local_gradients"], step["gradients"])
    replicas = len(next(iter(step["local_gradients"].values())))
    made = _of_means(step, local, _received(gradients, step["replica_gradients"], replicas))
    return replace(made, shown={"local_gradients": as_float(local), **made.shown})


def _of_means(step: RecordedStep, local: Tensors, shown: Tensors) -> ReductionStep:
    """Return a step from its ranks' gradients, which are means over their examples, and from what was made of them."""
    ranks = len(next(iter(local.values())))
    counts = np.array(step.sizes if len(step.sizes) == ranks else [1] * ranks, float)[:, None]
    sums = {name: scaled_by(counts, x[:, None].astype(float)) for name, x in local.items() if name in shown}
    return ReductionStep(counts, sums, None, {"gradients": {name: shown[name] for name in sums}})


def _received(gradients: Tensors, differing: Tensors, replicas: int) -> Tensors:
    """Return each replica's gradients, (R, ...).

    Args:
        gradients: those of the first replica.
        differing: gradients (R, ...) of the tensors in which the replicas differ.
    """
    return as_float(
        {name: differing.get(name, np.broadcast_to(x, (replicas, *x.shape))) for name, x in gradients.items()}
    )


def as_float(tensors: Tensors) -> Tensors:
    """Return tensors as float64."""
    return {name: x.astype(float) for name, x in tensors.items()}


def of_gradients(
    torch: Sequence[RecordedStep], jax: Sequence[RecordedStep], alignment: Alignment, replicas: int, floor: float
) -> Ruling:
    """Name the factor, or the missing mean, by which JAX's gradients differ from torch's at equal inputs.

    If neither does, the difference may be a multiple of the weights, as an L2 penalty in the loss of one side adds.
    """
    steps, penalised = [], []
    for of_torch, of_jax in zip(torch[:STEPS], jax[:STEPS], strict=True):
        same, differing = (alignment.of_jax(of_jax[stage]) for stage in ("gradients", "replica_gradients"))
        received, expected = _received(same, differing, replicas), as_float(alignment.of_torch(of_torch["gradients"]))
        steps.append((received, expected))
        params = as_float(alignment.of_torch(of_torch["params"]))
        excess = {name: x.mean(0) - expected[name] for name, x in received.items() if name in expected}
        penalised.append((excess, params, stage_norm(expected)))
    ruling = explain_received(steps, sizes_of(torch[0], replicas), floor)
    if not ruling.named and all(len({*step.sizes}) > 1 and step["local_gradients"] for step in torch):
        pairs = zip(torch, (received for received, _ in steps), strict=False)
        of_means = [_of_means(x, alignment.of_torch(x["local_gradients"], axes=1), jax) for x, jax in pairs]
        ruling = explain_reduction(of_means, ReductionRecipe(), floor=floor)
    return ruling if ruling.named else decide(_penalties(penalised, floor), floor)


def _penalties(steps: Sequence[tuple[Tensors, Tensors, float]], floor: float) -> Iterator[Hypothesis]:
    """Yield that the gradients of the tensors that differ do so by one multiple of the weights; and that none differs.

    Args:
        steps: differences of the gradients, weights, and the norm of all gradients.
    """
    differing = [(x, of[name]) for apart, of, scale in steps for name, x in apart.items() if norm(x) > floor * scale]
    if sum(x.size for x, _ in differing) < ENOUGH:
        return
    factor = sum(float(np.vdot(x, w)) for x, w in differing) / sum(float(np.vdot(w, w)) for _, w in differing)

    def left(factor: float) -> float:
        return max(
            min(norm(x - share * of[name]) for share in (0.0, factor)) / (scale or 1.0)
            for excess, of, scale in steps
            for name, x in excess.items()
        )

    what = Statement("penalty_in_loss", of="jax" if factor > 0 else "torch", factor=abs(factor))
    yield Hypothesis((Deviation("penalty_in_loss", what),), left(factor), 1)
    yield Hypothesis((), left(0.0))
