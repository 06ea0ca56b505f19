"""What the fine-tune claims, from what came of it on both sides."""

from statistics import fmean

from examples.arrays import distance, furthest
from examples.claims import Claim
from examples.fine_tune.job import Run

ROUNDING = 1e-12  # of float64, as a part of an array's largest value [measured: 5e-15]
AFTER_ADAM = 1e-9  # which makes much of small gradients [measured: 2e-13]
FLOAT32 = (1e-9, 1e-5)  # from, to [measured: 5e-7]
WORSE = 2.0  # how much further from float64 than transformers in 16 bits [measured: 0.7]


def proof(jax: Run, torch: Run) -> list[Claim]:
    """In float64, from the same weights, on the same pairs."""
    steps = len(jax.losses)
    rounded = distance(torch.as_it_comes, torch.logits)

    def equal(what: str, found: float, allowed: float = ROUNDING) -> Claim:
        return Claim(f"float64: {what} equal transformers'", found < allowed, jax=found)

    return [
        equal("logits", distance(jax.logits, torch.logits)),
        equal("gradients of the first step", furthest(jax.gradients, torch.gradients)),
        equal(f"losses of {steps} steps", distance(jax.losses, torch.losses), AFTER_ADAM),
        equal(f"parameters after {steps} steps", furthest(jax.parameters, torch.parameters), AFTER_ADAM),
        Claim("transformers' own float64 rounds to float32", FLOAT32[0] < rounded < FLOAT32[1], torch=rounded),
    ]


def rounding(dtype: str, jax: Run, torch: Run, exact: Run) -> Claim:
    """Logits before training, beside those in float64."""
    found, expected = (distance(run.logits, exact.logits) for run in (jax, torch))
    return Claim(f"{dtype}: logits are as far from float64", found < WORSE * expected + ROUNDING, found, expected)


def learning(dtype: str, common: float, jax: Run, torch: Run) -> list[Claim]:
    """Whether it learns.

    Args:
        common: the share of the held-out pairs that have the more frequent label.
    """
    runs = (jax, torch)
    falls = [
        fmean(run.losses[-len(run.losses) // 4 :]) / fmean(run.losses[: len(run.losses) // 4 or 1]) for run in runs
    ]
    right = [run.accuracy for run in runs]
    return [
        Claim(f"{dtype}: the loss falls, to this part", max(falls) < 1, *falls),
        Claim(f"{dtype}: of held-out pairs more than {common:.3g} right", min(right) > common, *right),
    ]
