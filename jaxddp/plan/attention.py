"""Memory traffic of attention scores, which a fused attention kernel would keep on the chip."""

from jaxddp.plan.costs import FREE
from jaxddp.plan.hlo import CompiledProgram


def score_bytes(program: CompiledProgram) -> int:
    """Return the bytes of attention scores that a program's kernels read and write.

    Scores are recognised by their size: that of a batched matrix product whose result is larger than both its operands
    together, as queries times keys is for sequences longer than a head is wide.
    """
    sizes = {
        one.results[0].size
        for name, body in program.computations.items()
        for one in body
        if one.opcode == "dot" and one.sizes("lhs_batch_dims")
        if one.results[0].size > sum(a.size for of in one.operands for a in program.by_name[name][of].results)
    }
    names = program.by_name[program.entry]
    moved = 0
    for one in program.computations[program.entry]:
        if one.opcode not in FREE:
            read = [array for name in one.operands if name in names for array in names[name].results]
            moved += sum(array.bytes for array in (*read, *one.results) if array.size in sizes)
    return moved
