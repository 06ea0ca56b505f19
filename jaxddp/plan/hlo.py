"""Compiled programs as XLA prints them: computations, instructions, and the sizes of their arrays."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from jaxddp.step.loops import ONE_PASS

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .*\{$")
_SHAPE = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body)=%?([\w.-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}|\b(?:true|false)_computation=%?([\w.-]+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_NAME = re.compile(r"%([\w.-]+)")


@dataclass(frozen=True)
class Array:
    """An array of a program.

    Attributes:
        dtype: XLA's name, such as "bf16".
        bits: bits per element.
        shape: sizes of its axes.
    """

    dtype: str
    bits: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes in memory."""
        return self.size * self.bits // 8


def arrays(shape: str) -> tuple[Array, ...]:
    """Return all arrays in a shape.

    >>> [array.bytes for array in arrays("(f32[2,3]{1,0}, s32[])")]
    [24, 4]
    """
    return tuple(
        Array(dtype, 8 if dtype == "pred" else int(bits), tuple(int(size) for size in sizes.split(",") if size))
        for dtype, bits, sizes in _SHAPE.findall(shape)
    )


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: its name, without a leading "%".
        opcode: "fusion", "all-reduce-start", ...
        results: arrays that it computes.
        operands: names of its operands.
        attributes: text after the operands.
        is_root: whether its computation returns its result.
    """

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str = field(repr=False)
    is_root: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of its results."""
        return sum(array.bytes for array in self.results)

    @property
    def called(self) -> list[str]:
        """Names of the computations that it calls: a fusion's, a loop's body, or all branches of a conditional."""
        branches = [name for pair in _BRANCHES.findall(self.attributes) for names in pair for name in names.split(",")]
        return [*_CALLED.findall(self.attributes), *(name.strip(" %") for name in branches if name)]

    @property
    def passes(self) -> int | None:
        """Passes of a loop; None: unknown. 1 for other instructions."""
        if self.opcode != "while":
            return 1
        match = _TRIP_COUNT.search(self.attributes)
        return int(match[1]) if match else 1 if f"/{ONE_PASS}/while" in self.attributes else None

    def sizes(self, attribute: str) -> tuple[int, ...]:
        """Return the numbers of an attribute such as `lhs_contracting_dims={1}`; () without it."""
        match = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.attributes)
        return tuple(int(number) for number in match[1].split(",") if number) if match else ()

    def text(self, attribute: str) -> str:
        """Return an attribute such as `custom_call_target="name"` or `dim_labels=b01f_o01i->b01f`; "" without it."""
        match = re.search(rf'\b{attribute}=(?:"([^"]*)"|([^\s,]+))', self.attributes)
        return (match[1] or match[2] or "") if match else ""


@dataclass(frozen=True)
class CompiledProgram:
    """A compiled program.

    Attributes:
        computations: instructions of each computation, in the order in which they run.
        entry: name of the computation that runs.
    """

    computations: dict[str, list[Instruction]]
    entry: str

    @cached_property
    def by_name(self) -> dict[str, dict[str, Instruction]]:
        """Instructions of each computation by name."""
        return {name: {one.name: one for one in body} for name, body in self.computations.items()}


def parse(text: str) -> CompiledProgram:
    """Parse a compiled program.

    Raises:
        ValueError: the text is not a compiled program.

    >>> program = parse('''
    ... ENTRY %main (x: f32[3]) -> f32[3] {
    ...   %x = f32[3]{0} parameter(0)
    ...   ROOT %sum = f32[3]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
    ... }
    ... ''')
    >>> program.computations[program.entry][1].operands
    ('x',)
    """
    computations: dict[str, list[Instruction]] = {}
    name = entry = None
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[2]
            computations[name] = []
            entry = name if match[1] else entry
        elif name is not None:
            computations[name].extend(_instruction(line))
    if entry is None:
        raise ValueError("no compiled program: it has no ENTRY computation")
    return CompiledProgram(computations, entry)


def _instruction(line: str) -> Iterator[Instruction]:
    left, equals, right = line.strip().partition(" = ")
    if not equals:
        return
    end = _closing(right) if right.startswith("(") else right.index(" ")
    shape, rest = right[:end], right[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    close = len(opcode) + _closing(rest[len(opcode) :])
    operands, attributes = rest[len(opcode) : close], rest[close:]
    is_root = left.startswith("ROOT ")
    name = left.removeprefix("ROOT ").lstrip("%")
    # A parameter's or constant's parentheses hold its number or value, which names nothing.
    names = () if opcode in ("parameter", "constant") else tuple(_NAME.findall(operands))
    yield Instruction(name, opcode, arrays(shape), names, attributes, is_root)


def _closing(text: str) -> int:
    """Return the end of the parenthesis with which a text starts."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(text)
