"""Records whose large tensors are projections of the whole, in place of excerpts."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxddp.parity.projections import COUNT
from jaxddp.parity.records import Record, Tensors

PARTS = ("projections", "local_projections", "optimizer_projections")  # of a record; "stage:tensor" -> projections


class Whole(Mapping[str, Tensors]):
    """A record in which projections, as long as the tensor, replace each large tensor that has them.

    Args:
        record: the record.
        notes: its notes.

    Attributes:
        projections: "stage:tensor" -> projections, (COUNT,), of local stages (W, COUNT).
    """

    def __init__(self, record: Record, notes: Mapping[str, Any]):
        self.notes, self._record = notes, record
        self.projections: Tensors = {}
        for part in PARTS:
            self.projections |= record.get(part, {})

    def __getitem__(self, stage: str) -> Tensors:
        scale = 1 / math.sqrt(COUNT)
        known = ((name, self.projections.get(f"{stage}:{name}"), x) for name, x in self._record[stage].items())
        return {name: x if whole is None else scale * whole for name, whole, x in known}

    def __iter__(self) -> Iterator[str]:
        return iter(self._record)

    def __len__(self) -> int:
        return len(self._record)
