"""Show where the time of a step goes on one CPU core: `python -m benchmarks.profile residual decoder`.

Profiles the workload's module in plain `jax.jit`, with the batch that each of two replicas has, and prints for each
kind of operation its milliseconds per step. It says which part of a step is XLA's arithmetic, which no trainer changes.
The kinds are of other steps than "all", which run without the profiler.
"""

import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from tyro.conf import Positional

from benchmarks.contenders import ALL_PEERS_AT
from benchmarks.jax_peers import ByHand
from benchmarks.trace import STEPS, Kernel, kernels, traced
from benchmarks.workloads import workloads
from jaxddp import cli
from jaxddp.errors import check_name
from jaxddp.plan.hlo import CompiledProgram, Instruction, parse

PROG = "python -m benchmarks.profile"
PRODUCTS, REDUCTIONS, COPIES, ELEMENTWISE = "products", "reductions", "copies", "elementwise"
KINDS = (PRODUCTS, REDUCTIONS, COPIES, ELEMENTWISE)
REDUCING = {"reduce", "reduce-window", "scatter"}
MOVING = {
    "bitcast",
    "broadcast",
    "concatenate",
    "constant",
    "copy",
    "pad",
    "parameter",
    "reshape",
    "slice",
    "transpose",
}


@dataclass(frozen=True)
class ProfileOptions:
    """Profile steps of some workloads on one core."""

    workloads: Positional[tuple[str, ...]] = tuple(workloads())
    """Names of the workloads; none: all."""
    small: bool = False
    """Tiny sizes, to see that it runs."""

    def __post_init__(self) -> None:
        for name in self.workloads:
            check_name("workload", name, tuple(workloads()))


def kind(opcodes: Iterable[str]) -> str:
    """Return the kind of an instruction with the opcodes of all that it computes.

    >>> kind({"fusion", "convolution", "add"}), kind({"transpose", "copy"}), kind({"reduce"}), kind({"tanh", "copy"})
    ('products', 'copies', 'reductions', 'elementwise')
    """
    inside = set(opcodes) - {"fusion", "call"}
    if inside & {"dot", "convolution"}:
        return PRODUCTS
    if inside & REDUCING:
        return REDUCTIONS
    return COPIES if inside <= MOVING else ELEMENTWISE


def by_kind(ran: Sequence[Kernel], program: CompiledProgram, steps: int) -> dict[str, float]:
    """Return the milliseconds per step of each kind of operation that a profiled program ran."""
    kinds = {one.name: kind(_opcodes(one, program)) for body in program.computations.values() for one in body}
    total = dict.fromkeys(KINDS, 0.0)
    for kernel in ran:
        if kernel.name in kinds:
            total[kinds[kernel.name]] += (kernel.end - kernel.begin) / 1e3 / steps
    return total


def _opcodes(one: Instruction, program: CompiledProgram) -> set[str]:
    """Return the opcodes of an instruction and of all that it calls, but for how a reduction combines two numbers."""
    if one.opcode in REDUCING:
        return {one.opcode}
    return {one.opcode}.union(*(_opcodes(each, program) for name in one.called for each in program.computations[name]))


def profile(name: str, small: bool) -> str:
    """Profile a workload; return its row of the table."""
    workload = workloads(small)[name]
    workload = replace(workload, batch_size=workload.batch_size // ALL_PEERS_AT)
    contender = ByHand(workload, jax.devices("cpu")[:1], "jit")
    compiled = contender.compiled()
    program, cost = compiled.as_text(), compiled.cost_analysis()
    assert program and cost, "XLA shows its CPU programs"
    contender.train(STEPS)
    milliseconds = 1e3 * contender.train(STEPS).seconds_per_step
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        trace = traced(contender.train, Path(folder))
    ran = [one for of_device in kernels(trace).values() for one in of_device]
    times = by_kind(ran, parse(program), STEPS)
    rate = cost["flops"] / times[PRODUCTS] / 1e6
    cells = "".join(f"{times[each]:13.2f}" for each in KINDS)
    return f"{name:16}{milliseconds:10.1f}{cells}{rate:12.3g}"


def main(options: ProfileOptions) -> None:
    """Print the table."""
    head = "".join(f"{each:>13}" for each in KINDS)
    print(f"{'ms per step':16}{'all':>10}{head}{'GFLOP/s':>12}")
    for name in options.workloads:
        print(profile(name, options.small), flush=True)


if __name__ == "__main__":
    with cli.one_line_errors(show_traceback=False):
        chosen = cli.parse_plain(ProfileOptions, sys.argv[1:], PROG)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before XLA starts a thread per core
    main(chosen)
