"""What a check has to judge and to explain by."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxddp.parity.cases import Question, Tensors
from jaxddp.parity.compare.judge import Judgement
from jaxddp.parity.port import Facts
from jaxddp.parity.records import StoredRecord
from jaxddp.parity.torch_side.rank import Summary


@dataclass(frozen=True)
class Evidence:
    """What both sides have shown, and where they part.

    Attributes:
        case, facts, summary, start: of the run.
        torch, jax: their records, jax's forced by torch's.
        reference, found: the folders in which these are.
        judgement: of the two.
    """

    case: Question
    facts: Facts
    summary: Summary
    start: Tensors
    torch: Sequence[StoredRecord]
    jax: Sequence[StoredRecord]
    reference: Path
    found: Path
    judgement: Judgement

    def before(self, step: int) -> Tensors:
        """The parameters before a step, from 0."""
        return self.start if step == 0 else self.torch[step - 1]["params"]
