"""What a check looks at in addition to the steps of its run, as plain data of the findings."""

import math
from dataclasses import dataclass

from jaxddp.parity.deviation import Statement
from jaxddp.parity.quote import Quote

# What determines a run in addition to its steps, in the order of the report.
ASPECTS = ("types", "rates", "initialisation", "evaluation")
DECISIVE = ("types", "evaluation")  # where one of these differs, the programs do, whatever is intended
# Kinds of trials outside of the run.
TRIALS = ("weights", "batch", "gradients", "optimizer_state", "replicas", "rates")


@dataclass(frozen=True)
class Aspect:
    """Comparison of something that determines a run in addition to its steps.

    Attributes:
        verdict: "equal", "differs" or "not compared".
        says: what differs, what was not compared and why, each in a sentence.
        residual, step, allowed, tensor: the worst, as in a `Difference`; NaN, 0 and "" where there is none.
    """

    verdict: str
    says: tuple[str, ...] = ()
    residual: float = math.nan
    step: int = 0
    allowed: float = math.nan
    tensor: str = ""


@dataclass(frozen=True)
class Trial:
    """A change of the run, under which both sides were compared once more.

    Attributes:
        kind: one of `TRIALS`.
        what: the change, as the end of a sentence ("gradients 1000 times as large").
        left_out: why it was not compared; "": it was.
    """

    kind: str
    what: str
    left_out: str = ""


@dataclass(frozen=True)
class Beyond:
    """A stage that is equal in the run, and differs in a trial.

    Attributes:
        trial: the first trial that shows it.
        stage, tensor, residual, allowed: as in a `Difference`.
        statements: what one side does, and the other does not: any of them; (): unknown.
        jax, torch: the line of each side; None: unknown.
        others: further trials that show it.
    """

    trial: Trial
    stage: str
    tensor: str
    residual: float
    allowed: float
    statements: tuple[Statement, ...] = ()
    jax: Quote | None = None
    torch: Quote | None = None
    others: tuple[Trial, ...] = ()


@dataclass(frozen=True)
class WithoutEffect:
    """An operation that changed nothing in any step, and that the other side does not have at its place.

    Attributes:
        side: "torch" or "jax"; "": it may be either's.
        operation: as the program has it ("jnp.clip(..., -3, 3)").
        why: why it had no effect ("never clips").
        line: its line.
    """

    side: str
    operation: str
    why: str
    line: Quote
