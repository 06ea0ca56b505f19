"""Claims of the fine-tune, checked against the runs of both frameworks."""

from statistics import fmean

from examples.arrays import distance, furthest
from examples.claims import Claim
from examples.fine_tune.job import Run

ROUNDING = 1e-12  # float64, relative to an array's largest value [measured: 5e-15]
AFTER_ADAM = 1e-9  # Adam magnifies the rounding of small gradients [measured: 2e-13]
FLOAT32 = (1e-9, 1e-5)  # range of float32's rounding [measured: 5e-7]
WORSE = 2.0  # times transformers' distance from float64, in 16 bits [measured: 0.7]


def proof(jax: Run, torch: Run) -> list[Claim]:
    """Claim that both frameworks compute the same in float64, from the same weights and pairs."""
    steps = len(jax.losses)
    rounded = distance(torch.unmodified, torch.logits)

    def equal(what: str, difference: float, allowed: float = ROUNDING) -> Claim:
        return Claim(f"float64: {what} equal transformers'", difference < allowed, jax=difference)

    return [
        equal("logits", distance(jax.logits, torch.logits)),
        equal("gradients of the first step", furthest(jax.gradients, torch.gradients)),
        equal(f"losses of {steps} steps", distance(jax.losses, torch.losses), AFTER_ADAM),
        equal(f"parameters after {steps} steps", furthest(jax.parameters, torch.parameters), AFTER_ADAM),
        Claim("unmodified transformers round to float32", FLOAT32[0] < rounded < FLOAT32[1], torch=rounded),
    ]


def rounding(dtype: str, jax: Run, torch: Run, exact: Run) -> Claim:
    """Claim that both frameworks' logits before training are about as far from those in float64."""
    ours, theirs = (distance(run.logits, exact.logits) for run in (jax, torch))
    return Claim(f"{dtype}: logits are about as far from float64's", ours < WORSE * theirs + ROUNDING, ours, theirs)


def learning(dtype: str, common: float, jax: Run, torch: Run) -> list[Claim]:
    """Claim that the model learns.

    Args:
        dtype: dtype of parameters and computation.
        common: share of the held-out pairs with the more frequent label.
        jax, torch: the runs.
    """
    runs = (jax, torch)
    falls = [
        fmean(run.losses[-len(run.losses) // 4 :]) / fmean(run.losses[: len(run.losses) // 4 or 1]) for run in runs
    ]
    right = [run.accuracy for run in runs]
    return [
        Claim(f"{dtype}: the loss falls; last quarter / first quarter", max(falls) < 1, *falls),
        Claim(f"{dtype}: held-out accuracy is above {common:.3g}", min(right) > common, *right),
    ]
