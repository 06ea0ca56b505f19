"""`jaxddp plan`: predict memory, time and scaling of a run on GPUs, without the GPUs."""

import contextlib
from collections.abc import Sequence

from jaxddp import cli
from jaxddp.config.hardware import gpu_named
from jaxddp.distributed.gpu_options import compiler_options
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError
from jaxddp.files import write_atomically
from jaxddp.plan import topology
from jaxddp.plan.batch import CHEAP_SECONDS, Largest, largest_batch
from jaxddp.plan.compiled import CompiledStep, Compiler
from jaxddp.plan.options import PROGRAM, PlanTrainerOptions, parse
from jaxddp.plan.picture import draw
from jaxddp.plan.prediction import Prediction
from jaxddp.plan.report import PlanReport
from jaxddp.plan.sources import workload_of
from jaxddp.plan.workload import nbytes
from jaxddp.program import Program
from jaxddp.scripts import errors_located

PROG = "jaxddp plan"


def main(options: PlanTrainerOptions, program: Program) -> None:
    """Compile, predict, print and write what `options` ask for."""
    gpu = gpu_named(options.gpu)
    devices = topology.gpus(gpu, options.per_node, options.num_nodes)
    workload = workload_of(options, program)
    compiler = Compiler(workload, Replicas(devices))
    chosen = compiler_options(nbytes(workload.gradients))
    before, after = (compiler.compile(workload.batch_size, flags) for flags in ({}, chosen))
    if options.program is not None:
        write_atomically(options.program, PROGRAM + after.text.encode())
    largest = None
    if options.largest_batch:
        largest = _largest(compiler, after, chosen, workload.accumulation_steps, gpu.usable_memory)
    default, tuned = (Prediction(compiled, gpu, options.per_node, options.num_nodes) for compiled in (before, after))
    report = PlanReport(workload, default, tuned, chosen, largest, options.measured)
    print(report)
    if options.picture is not None:
        write_atomically(options.picture, draw(report))
        print(f"\npicture: {options.picture}")


def _largest(
    compiler: Compiler, compiled: CompiledStep, flags: dict[str, object], pieces: int, limit: float
) -> Largest:
    """Return the largest batch that fits, from the compiled size and half of it."""
    size = compiled.batch_size
    other = size // 2 // pieces * pieces or 2 * size
    known = {size: compiled.memory, other: compiler.compile(other, flags).memory}
    cheap = compiled.seconds < CHEAP_SECONDS
    multiple = pieces * (8 if size >= 8 * pieces else 1)
    return largest_batch(known, limit, multiple, lambda wanted: compiler.compile(wanted, flags).memory, cheap)


def run(argv: Sequence[str]) -> None:
    """Run the command line."""
    show_traceback = "--traceback" in argv
    with cli.one_line_errors(show_traceback):
        with contextlib.suppress(InputError):  # reported after mistakes in the flags
            topology.start()
        options, program = parse([word for word in argv if word != "--traceback"], PROG)
        with errors_located(program.path or "", only_users=True):
            main(options, program)
