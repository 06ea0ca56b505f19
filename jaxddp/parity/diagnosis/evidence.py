"""Records of both sides and their comparison, from which the diagnosis finds causes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxddp.parity.case_interface import AnyCase
from jaxddp.parity.compare.judge import Judgement
from jaxddp.parity.excerpts import excerpts
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.port import Facts
from jaxddp.parity.records import StoredRecord, Tensors
from jaxddp.parity.sums import Summand, folded
from jaxddp.parity.torch_side.steps import Summary

LONG_REPLAYS = 2**22  # parameters of a model whose replays take long


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
        summands: see `jaxddp.parity.sums`; the reference's records are folded.
    """

    case: AnyCase
    facts: Facts
    summary: Summary
    start: Arrays
    torch: Sequence[StoredRecord]
    jax: Sequence[StoredRecord]
    torch_folder: Path
    jax_folder: Path
    judgement: Judgement
    summands: Sequence[Summand] = ()

    @property
    def is_large(self) -> bool:
        """Return whether replays are so slow that only faults of the first layer that differs are tried."""
        return sum(math.prod(shape) for shape in self.judgement.shapes.values()) > LONG_REPLAYS

    def before(self, step: int) -> Tensors:
        """Return the parameters before a step, counted from 0; excerpts of large ones."""
        start = folded("params", excerpts(self.start), self.summands)
        return dict(start) if step == 0 else self.torch[step - 1]["params"]
