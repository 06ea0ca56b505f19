"""Causes of a difference in rounding: the lines of the port's loss that lose digits in float32."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxddp.errors import listed
from jaxddp.parity.compare.numerics import ALLOWED, EPSILON
from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.findings import Cause, Difference, Numerics
from jaxddp.parity.jax_side.rounding import FindRounding, RoundedLines
from jaxddp.parity.operations import Lines

SHOWN = 6  # lines that are listed
FOLLOWING = ("local_loss", "local_gradients", "gradients", "update")  # stages that the rounding of a loss reaches


def explain_rounding(
    evidence: Evidence,
    searches: InterruptibleSearches,
    numerics: Mapping[str, Numerics],
    differences: Sequence[Difference],
) -> list[Difference]:
    """Return the differences, the first one in rounding with its cause, without those that follow from it.

    Args:
        evidence: records of both sides, compared.
        searches: runs the search in jax's process.
        numerics: distances of both sides' float32 runs.
        differences: differences, those in rounding among them.
    """
    apart = [one for one in differences if one.kind == "numeric" and one.stage in FOLLOWING and not one.cause]
    far = numerics.get("local_gradients")
    step = max((one.step for one in apart if one.stage.endswith("gradients")), default=0)
    if not step or far is None or far.jax <= far.torch:
        return list(differences)
    allowed = ALLOWED * max(far.torch, EPSILON)
    job = FindRounding(evidence.case, evidence.start, evidence.torch_folder, step - 1, 0, allowed)
    found = searches.run(lambda: searches.workers.jax.do(job), problems=[])
    if found is None:
        return list(differences)
    first = replace(apart[0], cause=_cause(found, far.torch))
    return [first if one is apart[0] else one for one in differences if one not in apart[1:]]


def _cause(found: RoundedLines, torch: float) -> Cause:
    """Return the cause, at the last of the lines: the one before it may only have made what it cancels."""
    narrow = sorted({dtype for dtype in found.dtypes.values() if dtype != "float32"})
    name = "rounded_to_16_bits" if narrow else "digits_lost"
    what = Statement("values_rounded", dtypes=tuple(narrow)) if narrow else Statement("digits_lost")
    *_, last = found.dtypes
    lines = listed([str(line) for line in found.dtypes], SHOWN, ", ")
    distances = f"{found.after:.0e} from those in float64, not {found.before:.0e}; torch's {torch:.0e}"
    measured = f"with {lines} computed in float64, the gradients are {distances}"
    return Cause.of([Deviation(name, what)], found.after, measured=measured, lines=Lines(last))
