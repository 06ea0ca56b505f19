"""Lines of the user's files for causes that no call of the loss shows, and for differences without a cause."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from jaxddp.parity.catalogue import EDITS, is_of_optimizer
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.diagnosis.forced.causes import OTHER_VALUES
from jaxddp.parity.diagnosis.forward.rank_job import ForwardDiagnosis, NeededValues
from jaxddp.parity.diagnosis.forward.reading import Reading
from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.diagnosis.search.decide import Ruling
from jaxddp.parity.findings import Problem
from jaxddp.parity.graph import operations_of
from jaxddp.parity.jax_side.optimizer_line import JaxOptimizerLine
from jaxddp.parity.jax_side.port_lines import MEAN, BatchLines, PortLines
from jaxddp.parity.jax_side.value_graph import ReadLoss
from jaxddp.parity.operations import Lines, OptimizerLines
from jaxddp.parity.torch_side.optimizer_line import TorchOptimizerLine
from jaxddp.parity.user_code.homes import home_of
from jaxddp.parity.user_code.line_values import first_apart
from jaxddp.parity.user_code.stated import call_in, makes_layers, returned_at

# Functions of each side; a port has one of them. MEAN: the mean over the replicas in a `jax_step`.
SAMPLES = ("jax_batch", "batch"), ("torch_batch", "batch")
LOSS = ("jax_loss",), ("torch_loss",)
REDUCTION = (MEAN, "jax_step"), ("torch_step",)
CLIPPED = (MEAN, "jax_step"), ("clip_grad_norm", "torch_clip_grad_norm", "clip_grad_value", "torch_step")
IN_STEP = ("jax_step",), ("torch_step",)
STEP = ("jax_step", "jax_loss"), ("torch_step", "torch_loss")
START = ("jax_start",), ()
RESTORE = ("jax_restore",), ()
MODEL = "jax_model"
CLIPPING = ("clip_missing", "clip_norm", "clip_by_value", "clip_epsilon")  # faults of a step or a chain that clips
APPLIED, APPLYING = "gradients_applied", ("apply_updates", "apply_gradients", "update")
SCHEDULE = ("schedule", "lr_off_by_one", "warmup_start", "scheduler_too_fast", "rate_rounded")
Functions = tuple[tuple[str, ...], tuple[str, ...]]


def read_program(
    evidence: Evidence,
    searches: InterruptibleSearches,
    loss: str,
    step: int,
    rank: int,
    backward: bool = False,
    needed: tuple[int, ...] = (),
) -> Reading | None:
    """Read the port's program of a loss; None: it cannot be read. See `ReadLoss`."""
    read = ReadLoss(evidence.case, evidence.start, evidence.torch_folder, step, rank, loss, backward, needed)
    graphs = searches.run(lambda: searches.workers.jax.do(read), problems=[])
    lines = searches.run(
        lambda: searches.workers.jax.do(PortLines(evidence.case, evidence.start, (MODEL,))), problems=[]
    )
    if graphs is None:
        return None
    program = () if graphs.run is None else operations_of(graphs.run)
    # A program of the trainer's has its model's function within another one.
    model = returned_at((lines or {}).get(MODEL)) or home_of(Path(evidence.case.name), MODEL)
    return Reading(program, step, rank, model, graphs.run, graphs.varied)


def explain_forward(
    evidence: Evidence, searches: InterruptibleSearches, job: ForwardDiagnosis
) -> tuple[Ruling | None, Ruling | None] | None:
    """Run a search on a torch rank, for a large program with the values that it needs; None: it failed."""
    reading, torch = job.reading, searches.workers.torch
    if reading is not None and reading.graph is not None and reading.graph.is_partial:
        needed = searches.run(lambda: torch.do(NeededValues(job))[0], problems=[]) or ()
        loss = job.loss or next(iter(job.moved), "loss")
        again = read_program(evidence, searches, loss, reading.step, reading.rank, needed=needed)
        job = replace(job, reading=again or reading)
    return searches.run(lambda: torch.do(job)[0])


def with_optimizer_lines(
    evidence: Evidence, searches: InterruptibleSearches, ruling: Ruling | None, tensor: str
) -> Ruling:
    """Add the lines at which both sides make the optimizer of a tensor to its faults, and to no cause at all.

    Faults of its schedule get those of the schedule, where the user's files have them.
    """
    workers, unseen = searches.workers, list[Problem]()
    step = _first_step(evidence)
    of_torch = TorchOptimizerLine(evidence.case.torch_source, tensor, step)
    of_jax = JaxOptimizerLine(evidence.case, evidence.start, tensor, step)
    jax = searches.run(lambda: workers.jax.do(of_jax), unseen) or OptimizerLines()
    torch = searches.run(lambda: workers.torch.do(of_torch)[0], unseen) or OptimizerLines()
    schedule = Lines(jax.schedule or jax.optimizer, torch.schedule or torch.optimizer)
    if jax.rates and torch.rates:
        apart = first_apart(jax.rates, torch.rates), first_apart(torch.rates, jax.rates)
        schedule = Lines(apart[0] or schedule.jax, apart[1] or schedule.torch)

    def applies(fault: str) -> bool:
        return is_of_optimizer(fault) or fault in EDITS

    is_spoiled = any(not x.finite for of_side in (jax.rates, torch.rates) for _, x in of_side)
    if (ruling is not None and ruling.named) or is_spoiled:
        ruling = _with_lines(ruling, schedule, SCHEDULE.__contains__)
    if ruling is not None and any(APPLIED in one.faults for one in ruling.named):
        applied = call_in(_lines_of_functions(evidence, searches, IN_STEP).jax, APPLYING)
        ruling = _with_lines(ruling, Lines(applied or jax.optimizer, torch.optimizer), APPLIED.__eq__)
    if ruling is not None and any(fault in CLIPPING for one in ruling.named for fault in one.faults):
        mean, number = _lines_of_functions(evidence, searches, CLIPPED)
        clips = jax.optimizer if evidence.facts.clips_inside else mean or jax.optimizer
        ruling = _with_lines(ruling, Lines(clips, number or torch.optimizer), CLIPPING.__contains__)
    ruling = _with_lines(ruling, Lines(jax.optimizer, torch.optimizer), applies)
    return with_function_lines(evidence, searches, ruling, REDUCTION)


def with_function_lines(
    evidence: Evidence, searches: InterruptibleSearches, ruling: Ruling | None, functions: Functions
) -> Ruling:
    """Add the lines of some functions of the port to the faults that have no line, and to no cause at all.

    Args:
        evidence, searches: see `find_differences`.
        ruling: the ruling; None: there was no search.
        functions: one of the constants above.
    """
    if ruling is not None and ruling.lines and all(line != Lines() for line in ruling.lines):
        return ruling
    return _with_lines(ruling, _lines_of_functions(evidence, searches, functions), lambda fault: True)


def with_loss_lines(evidence: Evidence, searches: InterruptibleSearches, ruling: Ruling | None) -> Ruling:
    """Add the lines that make the batch to faults of it, and those of the loss's functions to others without."""
    if ruling is not None and any(OTHER_VALUES in one.faults for one in ruling.named):
        ruling = with_batch_lines(evidence, searches, ruling, OTHER_VALUES.__eq__)
    return with_function_lines(evidence, searches, ruling, LOSS)


def with_buffer_line(evidence: Evidence, searches: InterruptibleSearches, ruling: Ruling | None) -> Ruling | None:
    """Put the port's line that makes a buffer's next value in place of one that does not make the layer."""
    located = evidence.judgement.first["buffers"]
    if ruling is None or not ruling.lines:
        return ruling
    program = read_program(evidence, searches, located.tensor, located.step - 1, 0)
    lines = [node.line for node in (program and program.graph) or () if node.line is not None]

    def made(of_fault: Lines) -> Lines:
        return Lines(lines[-1], of_fault.torch) if lines and not makes_layers(of_fault.jax) else of_fault

    return replace(ruling, lines=tuple(map(made, ruling.lines)))


def with_batch_lines(
    evidence: Evidence,
    searches: InterruptibleSearches,
    ruling: Ruling | None,
    applies: Callable[[str], bool] = lambda fault: True,
) -> Ruling:
    """Add the lines that first give other values to a batch to the faults to which they apply, that have none."""
    step = _first_step(evidence)
    found = searches.run(lambda: searches.workers.jax.do(BatchLines(evidence.case, step)), problems=[]) or Lines()
    functions = _lines_of_functions(evidence, searches, SAMPLES)
    return _with_lines(ruling, Lines(found.jax or functions.jax, found.torch or functions.torch), applies)


def _first_step(evidence: Evidence) -> int:
    """Return the first step, from 0, of which a stage differs."""
    return min(located.step for located in evidence.judgement.first.values()) - 1


def _lines_of_functions(evidence: Evidence, searches: InterruptibleSearches, functions: Functions) -> Lines:
    names = tuple(name for of_side in functions for name in of_side)
    job, unseen = PortLines(evidence.case, evidence.start, names), list[Problem]()
    known = searches.run(lambda: searches.workers.jax.do(job), unseen) or {}
    of_jax, of_torch = ([known[name] for name in names if name in known] for names in functions)
    return Lines(next(iter(of_jax), None), next(iter(of_torch), None))


def _with_lines(ruling: Ruling | None, lines: Lines, applies: Callable[[str], bool]) -> Ruling:
    """Add lines to the faults to which they apply, unless they have lines; if nothing is named, to the ruling."""
    ruling = ruling or Ruling((), None)
    faults: Sequence[str] = ruling.named[0].faults if ruling.named else ("",)
    there = (*ruling.lines, *[Lines()] * (len(faults) - len(ruling.lines)))
    wanted = (not ruling.named or applies(fault) for fault in faults)
    found = (lines if add and one == Lines() else one for one, add in zip(there, wanted, strict=False))
    return replace(ruling, lines=tuple(found))
