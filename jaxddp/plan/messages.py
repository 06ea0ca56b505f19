"""Number and size of the messages between replicas, read from a compiled program."""

from dataclasses import dataclass

from jaxddp.plan.hlo import CompiledProgram, parse


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
        ValueError: the text is not a compiled program, or a loop of unknown length sends messages.

    >>> all_reduces('''
    ... ENTRY %main (x: f32[3]) -> f32[3] {
    ...   %x = f32[3]{0} parameter(0)
    ...   ROOT %sum = f32[3]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
    ... }
    ... ''')
    Messages(count=1, bytes=12)
    """
    return _messages(text, "all-reduce")


def permutes(text: str) -> Messages:
    """Count a compiled program's messages of `lax.ppermute`, by the same rules as `all_reduces`."""
    return _messages(text, "collective-permute")


def _messages(text: str, kind: str) -> Messages:
    program = parse(text)
    return _total(program.entry, program, kind)


def _total(name: str, program: CompiledProgram, kind: str) -> Messages:
    count = size = 0
    for one in program.computations.get(name, []):
        # The start of an all-reduce and the end of a permutation have the shape of what is sent.
        if one.opcode in (kind, f"{kind}-{'start' if kind == 'all-reduce' else 'done'}"):
            count += 1
            size += one.bytes
            continue  # the computation that it calls only adds two numbers
        for called in one.called:
            inside = _total(called, program, kind)
            if inside.count and one.passes is None:
                raise ValueError(f"a loop of unknown length sends: {one.name}")
            count += inside.count * (one.passes or 1)
            size += inside.bytes * (one.passes or 1)
    return Messages(count, size)
