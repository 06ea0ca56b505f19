"""Number and size of the messages between replicas, read from a compiled program."""

import math
import re
from dataclasses import dataclass

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .*\{$")
_ALL_REDUCE = re.compile(r" = (.*?) all-reduce(?:-start)?\(")
_PERMUTE = re.compile(r" = (.*?) collective-permute(?:-done)?\(")  # a start's shape covers input and output
_SHAPE = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body)=%?([\w.-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass(frozen=True)
class Messages:
    """Messages of one kind that a replica sends in each run of the program.

    Attributes:
        count: number of instructions; an all-reduce may carry many arrays.
        bytes: total size of their arrays.
    """

    count: int
    bytes: int


def all_reduces(text: str) -> Messages:
    """Count a compiled program's all-reduces; those in a loop count once per pass.

    All branches of a conditional count.

    Raises:
        ValueError: the text is no compiled program, or a loop of unknown length sends.

    >>> all_reduces('''
    ... ENTRY %main (x: f32[3]) -> f32[3] {
    ...   %x = f32[3]{0} parameter(0)
    ...   ROOT %sum = f32[3]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
    ... }
    ... ''')
    Messages(count=1, bytes=12)
    """
    return _messages(text, _ALL_REDUCE)


def permutes(text: str) -> Messages:
    """Count a compiled program's messages of `lax.ppermute`, by the same rules as `all_reduces`."""
    return _messages(text, _PERMUTE)


def _messages(text: str, kind: re.Pattern[str]) -> Messages:
    computations, entry = _computations(text)
    if entry is None:
        raise ValueError("no compiled program: it has no ENTRY computation")
    return _total(entry, computations, kind)


def _computations(text: str) -> tuple[dict[str, list[str]], str | None]:
    """Return the lines of each computation, and the name of the entry computation."""
    computations: dict[str, list[str]] = {}
    name = entry = None
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[2]
            computations[name] = []
            entry = name if match[1] else entry
        elif name is not None:
            computations[name].append(line)
    return computations, entry


def _total(name: str, computations: dict[str, list[str]], kind: re.Pattern[str]) -> Messages:
    count = size = 0
    for line in computations.get(name, []):
        if match := kind.search(line):
            count += 1
            size += _bytes(match[1])
            continue  # the computation that it calls only adds two numbers
        branches = [branch.strip(" %") for match in _BRANCHES.finditer(line) for branch in match[1].split(",")]
        for called in [*_CALLED.findall(line), *branches]:
            inside = _total(called, computations, kind)
            passes = _passes(line) if inside.count else 1
            count += inside.count * passes
            size += inside.bytes * passes
    return Messages(count, size)


def _passes(line: str) -> int:
    if " while(" not in line:
        return 1
    if match := _TRIP_COUNT.search(line):
        return int(match[1])
    raise ValueError(f"a loop of unknown length sends: {line.strip()[:100]}")


def _bytes(shapes: str) -> int:
    """Sum the bytes of all arrays in a shape such as `(f32[2,3]{1,0}, s32[])`."""
    total = 0
    for kind, bits, sizes in _SHAPE.findall(shapes):
        elements = math.prod(int(size) for size in sizes.split(",") if size)
        total += elements * (8 if kind == "pred" else int(bits)) // 8
    return total
