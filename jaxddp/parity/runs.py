"""Runs of a check, whose records survive a failure of either side."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from jaxddp.errors import InputError
from jaxddp.parity.case_interface import AnyCase
from jaxddp.parity.cases import PortCase
from jaxddp.parity.compare.free_running import rounding_of_gradients
from jaxddp.parity.compare.judge import judge
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.findings import Problem
from jaxddp.parity.held_types import HeldTypes
from jaxddp.parity.jax_side.child import Forced, Free, JaxJob, NarrowArrays, Starts, jax_records
from jaxddp.parity.jax_side.twins import FindCrossedNames, FindTwins
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.operations import SourceLine
from jaxddp.parity.port import Facts
from jaxddp.parity.port.draws import Draw, DrawnSource, paired
from jaxddp.parity.processes import ChildError
from jaxddp.parity.progress import DRAW, FLOAT32, FORCED, FREE, Progress
from jaxddp.parity.records import Lazy, Records, RecordWriter, Scratch, StoredRecord, is_large_model, shapes_of
from jaxddp.parity.sums import Summand
from jaxddp.parity.torch_side.draw_weights import DrawWeights
from jaxddp.parity.torch_side.pool import torch_records
from jaxddp.parity.torch_side.rank import TorchJob, rank_folder
from jaxddp.parity.torch_side.steps import Steps, Summary
from jaxddp.parity.torch_side.widened import NarrowConstants
from jaxddp.parity.user_code.homes import home_of
from jaxddp.parity.workers import Workers

Draws = tuple[Draw, ...] | InputError | None  # or why they are not known
# Copies of a large model's weights in float64 at the worst moment, and further ones per replica.
COPIES = {True: (2.1, 1.6), False: (0.0, 8.0)}  # replicas share them: measured with two: 5.3; or do not: 15.8
AT_REST = 1.0  # GiB of all processes before a model is made
GIB = 2**30
OF_FLOAT32 = 1e-4  # largest residual for which arrays in float32 are looked for; measured: up to 3e-8
LOOK_AHEAD = 4  # learning rates are recorded for this many times the run's steps


class Runs:
    """Runs of both sides through the same steps; a failure of one side is recorded and the other continues.

    A forced run starts every step from the state of the reference, which is torch's float64 run.

    Args:
        case: model or port, world size, steps and batches.
        workers: processes in which the sides run.
        seed: seed from which torch draws the weights.
        progress: shows what is being done.

    Attributes:
        seed: as above.
        start: torch's weights before the first step; empty if they could not be drawn.
        facts: facts about the training loop.
        summary: summary of torch's run.
        starts: tensors in which the port's replicas start differently -> largest difference.
        names: proposed table of names, with rules as text; {}: none.
        no_twin: proposed constants; (): none.
        summands: elements of torch's vectors that jax's arrays add to others; torch's records are read accordingly.
        types: types that torch and jax hold as written; None: unknown, or a built-in model's.
        problems: runs that failed, and why.
        torch, jax: float64 records; jax's run is forced.
        free: float64 records of jax's free run.
        torch32, jax32: float32 records; both runs are forced.
    """

    def __init__(self, case: AnyCase, workers: Workers, seed: int = 0, progress: Progress | None = None):
        self.case, self._workers, self.seed = case, workers, seed
        self.progress = progress or Progress()
        self._scratch = Scratch()
        self.problems: list[Problem] = []
        self.start: Arrays = {}
        self.facts = Facts()
        self.summary = Summary("", [])
        self.starts: dict[str, float] = {}
        self.names: dict[str, str] = {}
        self.no_twin: tuple[str, ...] = ()
        self.summands: list[Summand] = []
        self.types: tuple[HeldTypes, HeldTypes] | None = None
        self.torch, self.torch32 = self._torch("torch64"), self._torch("torch32")
        self.jax, self.free, self.jax32 = self._jax("jax64"), self._jax("free"), self._jax("jax32")

    def in_float64(self) -> None:
        """Run torch freely, jax freely, and jax forced, in float64."""
        with self.progress.stage(DRAW):
            self._draw()
        if not self.start or self.problems:
            return
        if self._is_large:
            self.progress.say(memory_in_words(self.elements, self.case.world_size, self._shares))
        if self.facts.custom_start:
            with self._noting("jax"):
                self.starts = self._workers.jax.do(Starts(self.case, self.start))
        with self.progress.stage(FREE, torch=self.torch, jax=self.free):
            self._run_freely()
        if len(self.torch) and len(self.free):
            with self.progress.stage(FORCED, jax=self.jax), self._noting("jax"):
                self._workers.jax.do(Forced(self.case, self.start, self.path("torch64"), self.path("jax64")))

    def in_float32(self) -> None:
        """Run both sides forced, in float32."""
        case = self.case.with_dtype("float32")
        ranks = [rank_folder(self.path("torch64"), rank) for rank in range(case.world_size)]
        source, folder = case.torch_source, self.path("torch32")
        sizes, shares = (case.world_size, len(self.torch)), self._shares
        forced = Steps(source, "float32", *sizes, folder, self.start, reference=ranks, shares=shares)
        of_jax = Forced(case, self.start, self.path("torch64"), self.path("jax32"))
        stage = self.progress.stage(FLOAT32, torch=self.torch32, jax=self.jax32)
        with stage, self._beside(of_jax), self._noting("torch"):
            self._workers.torch.do(forced)

    def rounded(self) -> Records:
        """Run torch freely once more, with what jax's forced gradients differ by added to its own; return the records.

        Raises:
            ChildError: torch fails.
        """
        case, writer = self.case, RecordWriter(self.path("rounding"))
        for torch, jax in zip(self.torch, self.jax, strict=False):
            writer.write({"gradients": rounding_of_gradients(torch, jax)})
        sizes, folder, shares = (case.world_size, len(self.jax)), self.path("rounded"), self._shares
        source, rounding = case.torch_source, self.path("rounding")
        self._workers.torch.do(Steps(source, "float64", *sizes, folder, self.start, shares=shares, rounding=rounding))
        return self._torch("rounded")

    def narrow_arrays(self) -> tuple[str, ...]:
        """Describe each array that is declared in float32 and may explain small differences of the forced run."""
        results = () if self._is_large else self.evidence().judgement.results().values()
        beyond = [max(x.residuals) for x in results if not max(x.residuals) <= x.allowed]
        if self.problems or not isinstance(self.case, PortCase) or not beyond or not max(beyond) <= OF_FLOAT32:
            return ()
        arrays: tuple[str, ...] = ()
        constants: dict[str, SourceLine | None] = {}
        with suppress(ChildError):
            arrays = self._workers.jax.do(NarrowArrays(self.case, self.start))
            (constants,) = self._workers.torch.do(NarrowConstants(self.case.torch_source))
        line = home_of(Path(self.case.name), "jax_optimizer")
        narrow = [("jax", name, line) for name in arrays] + [("torch", *pair) for pair in constants.items()]
        return tuple(f"{side}'s {name}{'' if at is None else f' ({at})'}" for side, name, at in narrow)

    def crossed_names(self) -> str:
        """Look for two lines of the port's `names` whose swap makes the forward pass equal, and describe it."""
        if not isinstance(self.case, PortCase) or self._is_large or self.names:
            return ""
        source = self.case.source
        case = replace(self.case, source=source.source if isinstance(source, DrawnSource) else source)
        with self._noting("jax"):
            self.names, says = self._workers.jax.do(FindCrossedNames(case))
            return str(says)
        return ""

    def evidence(self, steps: int | None = None, jax: Records | None = None) -> Evidence:
        """Judge the forced run and return the evidence for a diagnosis.

        Args:
            steps: number of steps to use, from the first; None: all.
            jax: records of another forced run, which are judged in place of these; None: these.
        """
        if steps is None and jax is None:
            return self._evidence
        return self._judged(steps, jax)

    @cached_property
    def _evidence(self) -> Evidence:
        """Evidence of complete runs."""
        return self._judged(None, None)

    def _judged(self, steps: int | None, jax: Records | None) -> Evidence:
        torch, of_jax = _first(self.torch, steps), _first(self.jax if jax is None else jax, steps)
        judgement = judge(torch, of_jax, self.facts, self.summary.optimizer, self.summary.highest)
        judgement.shapes |= {name: x for name, x in shapes_of(self.start).items() if name in judgement.shapes}
        paths = self.path("torch64"), self.path("jax64")
        records = torch, of_jax, *paths
        return Evidence(self.case, self.facts, self.summary, self.start, *records, judgement, self.summands)

    def _draw(self) -> None:
        """Draw torch's weights, and check that each jax array and each draw of the losses has a twin."""
        draw = DrawWeights(self.case.torch_source, "float64", self.path("start"), self.seed)
        if not isinstance(self.case, PortCase):
            with self._noting("torch"):
                ((self.start, self.facts, *_),) = self._workers.torch.do(draw)
            return
        of_torch: Draws = None
        types: HeldTypes | None = None
        with self._beside(FindTwins(self.case)) as answers, self._noting("torch"):
            ((self.start, self.facts, of_torch, types),) = self._workers.torch.do(draw)
        if not self.start:  # jax has failed for the same reason, or may do better without it
            self.problems = [problem for problem in self.problems if problem.side != "jax"]
        self.case = replace(self.case, casts=self.facts.casts)
        for found in answers:
            self.names, self.no_twin = found.names, found.no_twin
            self.types = (types, found.types) if types and found.types else None
            self.summands += found.summands
            if found.without_twin:
                self.problems.append(Problem("port", "names", found.without_twin.removeprefix("names: ")))
            self._pair(self.case, of_torch, found.draws)

    def _pair(self, case: PortCase, torch: Draws, jax: Draws) -> None:
        """Let the losses of both sides draw the same numbers; what cannot be paired is a problem."""
        if not isinstance(torch, tuple) or not isinstance(jax, tuple):
            # The run reports a loss that fails, and must not continue if the other side draws random numbers.
            of_sides: dict[str, tuple[Draws, Draws]] = {"torch": (torch, jax), "jax": (jax, torch)}
            for side, (why, others) in of_sides.items():
                if isinstance(why, InputError) and isinstance(others, tuple) and others:
                    self.problems.append(Problem(side, f"{side}_loss", f"{why}", frames=why.frames))
            return
        try:
            pairs = paired(torch, jax)
        except InputError as error:
            self.problems.append(Problem("port", "draws", str(error)))
            return
        if pairs:
            self.case = replace(case, source=DrawnSource(case.source, pairs, self.seed))

    def _run_freely(self) -> None:
        """Run torch, which is the reference, and jax at the same time."""
        case = self.case
        source, folder, ahead = case.torch_source, self.path("torch64"), case.steps * LOOK_AHEAD
        count, shares = case.world_size, self._shares
        reference = Steps(source, "float64", count, case.steps, folder, self.start, ahead=ahead, shares=shares)
        with self._beside(Free(case, self.start, self.path("free"))), self._noting("torch"):
            self.summary = self._workers.torch.do(reference)[0]

    def both(self, of_jax: JaxJob, of_torch: TorchJob) -> tuple[Any, Any] | str:
        """Run a job of each side at the same time; return both answers, or why there are none.

        The failure of such a job is no problem of the check.
        """
        known = len(self.problems)
        answers_of_torch: list[Any] = []
        with self._beside(of_jax) as answers, self._noting("torch"):
            answers_of_torch = self._workers.torch.do(of_torch)
        self.problems, failures = self.problems[:known], self.problems[known:]
        if failures or not answers or not answers_of_torch:
            return "; ".join(map(str, failures)) or "a process has failed"
        return answers[0], answers_of_torch[0]

    @contextmanager
    def _beside(self, job: JaxJob) -> Iterator[list[Any]]:
        """Run a job of jax while the body of the `with` statement runs torch's; put its answer into the list."""
        begun, after, answers = False, self._is_large, list[Any]()
        if not after:  # for a large model, one side has to end before the other begins
            with self._noting("jax"):
                self._workers.jax.start(job)
                begun = True
        yield answers
        with self._noting("jax"):
            if after:
                self._workers.end_torch(patience=10.0)
                answers.append(self._workers.jax.do(job))
            elif begun:
                answers.append(self._workers.jax.wait())

    @property
    def elements(self) -> int:
        """Number of elements of the model's tensors."""
        return sum(math.prod(shape) for shape in shapes_of(self.start).values())

    @property
    def _is_large(self) -> bool:
        return is_large_model(self.start)

    @property
    def _shares(self) -> bool:
        """Return whether the replicas of a large port may share their weights."""
        return isinstance(self.case, PortCase) and not self.facts.moves_weights

    @contextmanager
    def _noting(self, side: str) -> Iterator[None]:
        """Turn a failure of a child into a problem, each message once per side."""
        try:
            yield
        except ChildError as error:
            self._workers.end_after(error)
            where = error.where if error.child == side else f"{error.child}, {error.where}"
            side, where = ("port", "file") if error.of_file else (side, where)
            if (side, error.what) not in {(problem.side, problem.message) for problem in self.problems}:
                told = Problem(side, where, error.what, frames=error.frames, trace=error.trace)
                self.problems.append(told)

    def path(self, name: str) -> Path:
        """Return the path of a folder for records, which is deleted with the runs."""
        return self._scratch.path / name

    def _torch(self, name: str) -> Records:
        return torch_records(self.path(name), self.case.world_size, summands=self.summands)

    def _jax(self, name: str) -> Records:
        return jax_records(self.path(name))


def memory_in_words(elements: int, world_size: int, shares: bool = True) -> str:
    """Describe how much memory a check takes at most, and how much the machine has.

    Args:
        elements: number of parameters.
        world_size: number of replicas.
        shares: the replicas share weights.

    >>> memory_in_words(124_000_000, 2).partition(",")[0]
    'a model of 124 million parameters takes about 6 GiB'
    """
    common, per_replica = COPIES[shares]
    needed = AT_REST + (common + per_replica * world_size) * 8 * elements / GIB
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    says = f"a model of {elements / 1e6:.0f} million parameters takes about {needed:.0f} GiB, this machine has"
    return f"{says} {there:.0f} GiB{'; fewer replicas take less' if needed > there else ''}"


def _first(records: Records, steps: int | None) -> Lazy[StoredRecord]:
    if steps is None:
        return records
    return Lazy(partial(_length, records, steps), records.__getitem__)  # without a lambda: a rank is sent it


def _length(records: Records, most: int) -> int:
    return min(most, len(records))
