"""Sentences on what two recordings do not show, or show otherwise than one may think."""

from collections.abc import Iterator, Mapping, Sequence

from jaxddp.errors import count, listed
from jaxddp.parity.compare.clipping import NOT_CLIPPED, Clipping
from jaxddp.parity.compare.judge import Located
from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.findings import STAGE_NAMES, Cause, Problem
from jaxddp.parity.recorder.excerpt_grid import is_excerpt
from jaxddp.parity.recordings.aligned import Alignment
from jaxddp.parity.recordings.judge import MOST_APART, contiguous
from jaxddp.parity.recordings.judgement import RecordedJudgement
from jaxddp.parity.recordings.names import Twins
from jaxddp.parity.recordings.outside import OutsideChanges
from jaxddp.parity.recordings.run import RecordedStep, Recording
from jaxddp.parity.recordings.samples import Numbers

START_FIX = (
    "save torch's weights as safetensors and convert them for the jax model: jaxddp convert PROGRAM.py "
    "WEIGHTS.safetensors OUT.safetensors, or load them by the names above"
)


def remarks(
    torch_run: Recording,
    jax_run: Recording,
    judgement: RecordedJudgement,
    twins: Twins,
    clipping: Clipping | None,
    outside: OutsideChanges | None,
) -> Iterator[str]:
    """Yield the remarks on a comparison.

    Args:
        torch_run, jax_run: the recordings.
        judgement: their comparison.
        twins: the pairing of their arrays.
        clipping: how torch clips; None: by another rule.
        outside: what changes parameters outside of the updates.
    """
    if torch_run.steps.keys() != jax_run.steps.keys():
        yield f"Torch recorded {steps_in_words(torch_run)}, jax {steps_in_words(jax_run)}."
    for run in (torch_run, jax_run):
        if run.unfinished is not None:
            yield f"The recording of {run.side} ends within step {run.unfinished}."
    if torch_run.world_size != jax_run.world_size:
        sizes = f"torch ran on {torch_run.world_size} replicas and jax on {jax_run.world_size}"
        yield f"{sizes}: the batches of all replicas are compared together."
    if twins.by_order and not are_paired(judgement):
        layers = listed([", ".join(group) for group in twins.by_order])
        yield f"Only their order pairs the layers {layers} with torch's; --names FILE says what is right."
    followed = contiguous(judgement.numbers)
    if len(followed) < len(judgement.numbers):
        first, allowed = judgement.numbers[len(followed)], judgement.allowed.get("update", 0.0)
        yield (
            f"Not all steps from 1 on are recorded, so from step {first} on updates are compared with one another, and "
            f"not with what the optimizer makes of the gradients: residuals up to {allowed:.1g} count as equal."
        )
    if outside is not None and outside.torch and outside.jax:
        tensors = {name for changes in outside.torch.values() for name in changes}
        yield f"Both sides change {listed(sorted(tensors), joint=', ')} alike, outside of their optimizers' updates."
    if excerpts := [name for name, shape in torch_run.shapes.items() if is_excerpt(shape, torch_run.limit)]:
        yield f"Of {count(len(excerpts), 'tensor')} the recordings hold excerpts and norms: {listed(excerpts)}."
        lacking = [] if outside is None else [n for n in outside.alignment.unprojected() if n in excerpts]
        if not all(step["projections"] for run in (torch_run, jax_run) for step in run.steps.values()):
            yield "No projections of whole tensors are compared: a recording has none, as those of earlier versions."
        elif lacking:
            yield f"No projections of {listed(lacking)} are compared: jax fuses, stacks or reshapes them."
    for stage, tips in judgement.tips.items():
        worst = max(tip.residual for tip in tips)
        steps = f"step {tips[0].step} differs" if len(tips) == 1 else f"{len(tips)} steps differ"
        yield (
            f"In the {STAGE_NAMES[stage]}, {steps} by at most {worst:.1g}, in some gradients that pass through a ReLU, "
            "a maximum or another kink, and in no others: rounding that tips a value over it has this effect."
        )
    for stage, located in judgement.tipped.items():
        yield (
            f"In the {STAGE_NAMES[stage]}, step {located.step} differs by {located.residual:.1g} and most others are "
            "equal: so does rounding that tips a ReLU or the maximum of a pool over."
        )
    if clipping is not None and clipping.max_norm is not None:
        yield f"Torch clips at norm {clipping.max_norm:g}, as its gradients show."


def are_paired(judgement: RecordedJudgement) -> bool:
    """Return whether parameters stay near one another over steps that set layers apart, like only right pairs."""
    return len(judgement.apart) > 1 and judgement.apart[-1] <= MOST_APART


def steps_in_words(run: Recording) -> str:
    """Describe the steps of a recording."""
    numbers = [*run.steps]
    span = f"steps {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"step {numbers[0]}"
    return span if numbers[-1] - numbers[0] < len(numbers) else f"{len(numbers)} of {span}"


def problems(
    twins: Twins, alignment: Alignment | None, jax: Sequence[RecordedStep], examples: tuple[Numbers, Numbers]
) -> Iterator[Problem]:
    """Yield what keeps the recordings from being compared."""
    if twins.problem:
        yield Problem("port", "names", f"{twins.problem}; give a table with --names FILE")
    if alignment is not None and alignment.uncovered:
        says = f"the excerpts of {listed(alignment.uncovered, joint=', ')} have no common element"
        yield Problem("port", "tensors", f"{says}; record with a larger limit")
    if not any(step["update"] for step in jax):
        yield Problem("jax", "update", "not compared: give updates, or params, to jax's step")
    if not examples[0][0]:
        yield Problem("port", "samples", "the batches have no entries in common; pass the same arrays to step")


def unseen(jax: Sequence[RecordedStep], clipping: Clipping | None) -> list[str]:
    """Return the stages that JAX's loop did not give."""
    wanted = ("gradients", "update", "optimizer_state", *["clipped_gradients"] * (clipping != NOT_CLIPPED))
    return [stage for stage in wanted if not any(step[stage] for step in jax)]


def start_cause(located: Located, worst: Mapping[str, float]) -> Cause:
    """Return the cause of parameters that differ before the first step, with the residuals there."""
    differing = sum(value > located.allowed for value in worst.values())
    what = Statement("runs_begin_apart", step=located.step, differing=differing, tensors=len(worst))
    measured = f"the parameters before step {located.step} differ by {located.residual:.2g} in {located.tensor}"
    fix = START_FIX if located.step == 1 else "record from step 1 on, where both begin with the same weights"
    return Cause((Deviation("different_start", what, fix=fix),), 0.0, measured=measured)


def outside_cause(outside: OutsideChanges, located: Located) -> Cause:
    """Return the cause of changes outside of the updates that the sides do not share."""
    torch, jax = (sorted(side.get(located.step, {})) for side in (outside.torch, outside.jax))
    side = "both" if torch and jax else "torch" if torch else "jax"
    what = Statement("outside_change", by=side, names=tuple(torch or jax), step=located.step)
    fix = "do the same on both sides: a clamp, a reset, an average or a loading of weights"
    measured = f"the changes of {located.tensor} differ by {located.residual:.2g} of its norm"
    return Cause((Deviation("outside_change", what, fix=fix),), 0.0, measured=measured)
