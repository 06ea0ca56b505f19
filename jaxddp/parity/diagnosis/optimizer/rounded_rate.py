"""Find updates that are multiples of the reference's, by no more than a rate's rounding to float32.

A rate that is itself a float32 number is allowed for, see `compare.rates`; one that is made of such numbers is not.
"""

import numpy as np

from jaxddp.parity.compare.rates import is_float32, share_of
from jaxddp.parity.deviation import Deviation
from jaxddp.parity.diagnosis.optimizer.program import OptimizerProgram
from jaxddp.parity.diagnosis.optimizer.update_evidence import OptimizerEvidence, replay, residuals
from jaxddp.parity.diagnosis.search.decide import Hypothesis

ALLOWED = 5e-7  # of the largest rate; measured: 3e-8 (optax's cosine_onecycle_schedule), 2e-8 (torch's ASGD)


def rounded_rate(evidence: OptimizerEvidence, program: OptimizerProgram, floor: float) -> Hypothesis | None:
    """Return the hypothesis that a part of the learning rate is in float32; None: it is not, or is allowed for.

    Args:
        evidence: the run.
        program: the reference's program.
        floor: the largest residual that counts as rounding.
    """
    worst, furthest, peak = 0.0, 0.0, max(evidence.highest, float(np.max(program.lr))) or 1.0
    is_allowed = True
    for index, (step, predicted, _) in enumerate(replay(program, evidence)):
        scaled, rates = dict(predicted), dict(zip(program.names, program.lr[index].tolist(), strict=True))
        for group in step.groups:
            names = [name for name in group["names"] if name in predicted]
            share, rate = share_of(step.update, predicted, names), rates[names[0]] if names else 0.0
            off = abs(share - 1) * rate / peak
            furthest = max(furthest, off)
            is_allowed &= off <= floor or is_float32(share * rate)
            scaled |= {name: share * predicted[name] for name in names}
        worst = max(worst, *residuals(step.update, scaled).values())
        if not (worst <= floor and furthest <= ALLOWED):
            return None
    if is_allowed:
        return None
    says = f"the learning rate is off by {furthest:.0e} of the largest, as where a part of it is computed in float32"
    measured = "each update is a multiple of the reference's"
    return Hypothesis((Deviation("rate_rounded", says),), worst, measured=measured)
