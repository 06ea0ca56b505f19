"""Sentences on what two recordings do not show, or show otherwise than one may think."""

from collections.abc import Iterator

from jaxddp.errors import listed
from jaxddp.parity.compare.clipping import Clipping
from jaxddp.parity.recordings.judge import MOST_APART, contiguous
from jaxddp.parity.recordings.judgement import RecordedJudgement
from jaxddp.parity.recordings.names import Twins
from jaxddp.parity.recordings.run import Recording
from jaxddp.parity.report.words import STAGE_NAMES


def remarks(
    torch_run: Recording, jax_run: Recording, judgement: RecordedJudgement, twins: Twins, clipping: Clipping | None
) -> Iterator[str]:
    """Yield the remarks on a comparison.

    Args:
        torch_run, jax_run: the recordings.
        judgement: their comparison.
        twins: the pairing of their arrays.
        clipping: how torch clips; None: by another rule.
    """
    if torch_run.world_size != jax_run.world_size:
        sizes = f"torch ran on {torch_run.world_size} replicas and jax on {jax_run.world_size}"
        yield f"{sizes}: the batches of all replicas are compared together."
    if twins.by_order and not are_paired(judgement):
        layers = listed([", ".join(group) for group in twins.by_order])
        yield f"Only their order pairs the layers {layers} with torch's; --names FILE says what is right."
    if not contiguous(judgement.numbers):
        yield "The recordings do not begin at step 1, so updates are compared with torch's own, to about 1 %."
    for stage, tips in judgement.tips.items():
        worst = max(tip.residual for tip in tips)
        steps = f"step {tips[0].step} differs" if len(tips) == 1 else f"{len(tips)} steps differ"
        yield (
            f"Of the {STAGE_NAMES[stage]}, {steps} by at most {worst:.1g}, in some tensors behind a ReLU, a maximum "
            "or another kink, and in no others: so does rounding that tips it over."
        )
    for stage, located in judgement.tipped.items():
        yield (
            f"Of the {STAGE_NAMES[stage]}, step {located.step} differs by {located.residual:.1g} and most others are "
            "equal: so does rounding that tips a ReLU or the maximum of a pool over."
        )
    if clipping is not None and clipping.max_norm is not None:
        yield f"Torch clips at norm {clipping.max_norm:g}, as its gradients show."


def are_paired(judgement: RecordedJudgement) -> bool:
    """Return whether parameters stay near one another over steps that set layers apart, as only right pairs do."""
    return len(judgement.apart) > 1 and judgement.apart[-1] <= MOST_APART
