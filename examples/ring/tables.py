"""Tables of the ring and the collectives, with a column per replica."""

from collections.abc import Iterable, Sequence
from string import ascii_lowercase

import numpy as np
from numpy.typing import NDArray

from examples.ring.inputs import COLLECTIVES, Arrays, given


def contributors(value: float) -> list[int]:
    """Return the replicas whose numbers are in a sum of `inputs.buffers`.

    >>> contributors(3030)
    [1, 3]
    """
    return [place for place, digit in enumerate(reversed(str(round(value)))) if digit != "0"]


def chunk_label(chunk: int, value: float, world_size: int) -> str:
    """Label a chunk by its letter and the replicas summed so far, in order; a capital letter if all are.

    >>> chunk_label(2, 3003, world_size=4), chunk_label(0, 1111, world_size=4)
    ('c30', 'A')
    """
    who = contributors(value)
    if len(who) == world_size:
        return ascii_lowercase[chunk].upper()
    travelled = sorted(who, key=lambda rank: (rank - chunk) % world_size)  # chunk r starts at replica r
    return ascii_lowercase[chunk] + "".join(map(str, travelled))


def step_names(world_size: int) -> list[str]:
    """Return the row names of a table of steps."""
    halves = [f"{half} {step}" for half in ("reduce-scatter", "all-gather") for step in range(1, world_size)]
    return ["start", *halves]


def travel(steps: NDArray[np.float64]) -> str:
    """Format the labels of the chunks that each replica holds, step by step.

    Args:
        steps: chunks of the buffer "even", (N, 2N - 1, N chunks, 1).
    """
    world_size = len(steps)
    return _table(
        step_names(world_size),
        [
            [
                "  ".join(chunk_label(c, value, world_size).ljust(world_size) for c, value in enumerate(held[:, 0]))
                for held in of_replica
            ]
            for of_replica in steps.swapaxes(0, 1)
        ],
    )


def numbers(steps: NDArray[np.float64], replica: int) -> str:
    """Format the numbers that one replica holds, step by step, with a column per chunk.

    Args:
        steps: chunks of all replicas, (N, 2N - 1, N chunks, chunk).
        replica: the replica to show.
    """
    rows = [[_cell(chunk, width=len(steps)) for chunk in held] for held in steps[replica]]
    heads = [f"chunk {letter}" for letter in ascii_lowercase[: len(steps)]]
    return _table(step_names(len(steps)), rows, heads)


def before_and_after(collectives: Arrays) -> str:
    """Format each collective's input and result on every replica; zeros are dots."""
    world_size = len(collectives["broadcast"])
    rows = [[*map(_cell, given(world_size)[name]), "->", *map(_cell, collectives[name])] for name in COLLECTIVES]
    names = [f"{name} {_shown(options)}".rstrip() for name, options in COLLECTIVES.items()]
    heads = _heads(world_size)
    return _table(names, rows, [*heads, "", *heads])


def _shown(options: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _cell(values: NDArray[np.float64], width: int = 0) -> str:
    return " ".join(f"{value:{width}.0f}" if value else ".".rjust(width) for value in np.ravel(values))


def _heads(world_size: int) -> list[str]:
    return [f"replica {rank}" for rank in range(world_size)]


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], heads: Sequence[str] = ()) -> str:
    """Format rows under heads, each column as wide as its widest cell."""
    lines = [["", *(heads or _heads(len(rows[0])))], *([name, *row] for name, row in zip(names, rows, strict=True))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_line(line, widths) for line in lines)


def _line(cells: Iterable[str], widths: Iterable[int]) -> str:
    return "   ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
