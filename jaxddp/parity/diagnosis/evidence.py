"""Records of both sides and their comparison, from which causes are found."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxddp.parity.compare.judge import Judgement
from jaxddp.parity.port import Facts
from jaxddp.parity.question import Question
from jaxddp.parity.records import StoredRecord, Tensors
from jaxddp.parity.torch_side.rank import Summary


@dataclass(frozen=True)
class Evidence:
    """Records of both sides, and where they differ.

    Attributes:
        case, facts, summary: the run.
        start: parameters and buffers before the first step.
        torch: the reference's records.
        jax: the port's records, each step taken from the reference's weights.
        torch_folder, jax_folder: folders of these records.
        judgement: comparison of the two.
    """

    case: Question
    facts: Facts
    summary: Summary
    start: Tensors
    torch: Sequence[StoredRecord]
    jax: Sequence[StoredRecord]
    torch_folder: Path
    jax_folder: Path
    judgement: Judgement

    def before(self, step: int) -> Tensors:
        """Return the parameters before a step, counted from 0."""
        return self.start if step == 0 else self.torch[step - 1]["params"]
