"""Claims of an example: what was measured in JAX and in PyTorch, and whether each claim holds."""

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 12  # of a number's column


@dataclass(frozen=True)
class Claim:
    """One line of an example's result.

    Attributes:
        says: the claim, worded as a true statement.
        holds: whether the measurement confirms it.
        jax, torch: measured value to print; "" if the framework has no part in the claim.
    """

    says: str
    holds: bool
    jax: float | str = ""
    torch: float | str = ""


def report(claims: Sequence[Claim]) -> int:
    """Print a line for each claim; return the number of claims that do not hold.

    >>> report([Claim("the mean is the mean", True, 1.2e-16, 0.0), Claim("2 devices are twice as fast", False, 1.4)])
                                        JAX       torch
    the mean is the mean            1.2e-16           0  holds
    2 devices are twice as fast         1.4              DOES NOT HOLD
    <BLANKLINE>
    1 of 2 claims hold
    1
    """
    widest = max(len(claim.says) for claim in claims)
    print(f"{'':{widest}}{'JAX':>{WIDTH}}{'torch':>{WIDTH}}")
    for claim in claims:
        numbers = "".join(f"{_shown(value):>{WIDTH}}" for value in (claim.jax, claim.torch))
        print(f"{claim.says:{widest}}{numbers}  {'holds' if claim.holds else 'DOES NOT HOLD'}")
    holding = sum(claim.holds for claim in claims)
    print(f"\n{holding} of {len(claims)} claims hold")
    return len(claims) - holding


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"
