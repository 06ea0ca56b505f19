"""Segments in which two programs differ, and hits: segments after which a call computes what the port does."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from jaxddp.parity.diagnosis.forced.align import Alignment
from jaxddp.parity.diagnosis.forced.layouts import Order
from jaxddp.parity.diagnosis.forward.calls import CallEdit
from jaxddp.parity.graph import ARGUMENT, Graph
from jaxddp.parity.operations import Lines, SourceLine

CONSTANT = "a constant"  # name of such a value on both sides


@dataclass(frozen=True)
class UserCall:
    """A call of a user's function, or of a layer, that both programs make.

    Attributes:
        lines: the lines that make it.
        name: name of torch's function; "": unknown.
    """

    lines: Lines
    name: str


@dataclass(frozen=True, eq=False)
class Segment:
    """Operations of both sides that get equal inputs and give other outputs.

    Attributes:
        torch, jax: indices of the values that they compute; one of them may be empty.
        ends: the values, torch's and the port's, from which both continue alike.
        joined: values of both, torch's and the port's, that are equal after these; None: the losses.
        inside: whether the segment computes torch's value; False: it is equal, and the port uses another one here.
        order: order in which torch's value would hold the port's; None: unknown.
        call: number of the next call of torch, from which on both are equal again; `ARGUMENT`: the losses.
        edits: if the segment is this call, the fault with which it computes what the port does.
        user_call: what the port gives the other value to, if that is more than the next call; None: it is not.
    """

    torch: tuple[int, ...]
    jax: tuple[int, ...]
    ends: tuple[int, int]
    joined: tuple[int, int] | None = None
    inside: bool = True
    order: Order | None = None
    call: int = ARGUMENT
    edits: tuple[CallEdit, ...] = ()
    user_call: UserCall | None = None


@dataclass(frozen=True)
class Hit:
    """Segments after which a call computes what the port does.

    Attributes:
        segments: what differs before it.
        cost: number of operations of both sides in these.
        strange: number of inputs of the segments that only one side has; of a fault, its tier.
        alignment: with these segments forced.
        left: number of torch's values that still differ.
        is_early: a value that torch computes only later is given to the call.
    """

    segments: tuple[Segment, ...]
    cost: int
    strange: int
    alignment: Alignment
    left: int
    is_early: bool = False

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """Rank among the hits that take as many operations."""
        return bool(self.left), self.is_early, self.left


def signature(torch: Graph, jax: Graph, segments: Sequence[Segment]) -> tuple[tuple[SourceLine | str | None, ...], ...]:
    """Return what the hits of one fault in several places have in common: the lines of its segments."""
    return tuple(
        (
            torch[one.ends[0]].name,
            torch[(one.joined or one.ends)[0]].line,
            *(torch[k].line for k in one.torch),
            "",
            jax[one.ends[1]].line,
            *(line for line, _ in itertools.groupby(jax[k].line for k in one.jax)),
        )
        for one in segments
    )
