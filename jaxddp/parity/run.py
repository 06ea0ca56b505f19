"""The runs that a check makes, whatever happens to either side, and the report on them."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from jaxddp.parity.case import Question, Tensors
from jaxddp.parity.children import ChildError
from jaxddp.parity.compare import residuals
from jaxddp.parity.environment import environment
from jaxddp.parity.explain import Evidence, explain
from jaxddp.parity.findings import ORDER, Cause, Difference, Numerics, Problem, Report, StageResult
from jaxddp.parity.jax_child import Forced, Free, Starts, jax_records
from jaxddp.parity.judge import judge
from jaxddp.parity.numerics import compare_numerics
from jaxddp.parity.port import Facts
from jaxddp.parity.records import Records, Scratch
from jaxddp.parity.run_torch import torch_records
from jaxddp.parity.torch_rank import Draw, Steps, Summary, rank_folder
from jaxddp.parity.workers import Workers

FREE_ALLOWED = 1e-8  # of the distance from the start; measured: up to 2e-11
LOOK_AHEAD = 4  # learning rates are told for so many times the run's steps


class Run:
    """One check.

    Args:
        case: what is compared.
        workers: the processes.
        seed: from which torch draws the weights.
    """

    def __init__(self, case: Question, workers: Workers, seed: int):
        self._case, self._workers, self._seed = case, workers, seed
        self._scratch = Scratch()
        self._problems: list[Problem] = []
        self._start: Tensors = {}
        self._facts = Facts()
        self._summary = Summary("", [])

    def make(self, numerics: bool) -> Report:
        """Run both sides, compare, explain.

        Args:
            numerics: in float32 too.
        """
        with self._noting("torch"):
            draw = Draw(self._case.torch_source, "float64", self._seed)
            ((self._start, self._facts),) = self._workers.torch.do(draw)
        if not self._start:
            return self._report()
        differences = self._different_starts()
        self._by_themselves()
        torch, jax = self._torch("torch64"), self._jax("jax64")
        if len(torch):
            with self._noting("flax"):
                self._workers.jax.do(Forced(self._case, self._start, self._path("torch64"), self._path("jax64")))
        self._not_a_number(torch, jax)
        judgement = judge(torch, jax, self._facts, self._summary.optimizer)
        evidence = Evidence(
            self._case, self._facts, self._summary, self._start, self._path("torch64"), self._path("jax64"), judgement
        )
        differences += explain(evidence, self._workers, self._problems)
        free = self._free_running(torch)
        results: dict[str, Numerics] = {}
        if numerics and len(jax):
            self._float32()
            results, numeric = compare_numerics(
                (jax, self._jax("jax32")), (torch, self._torch("torch32")), self._facts.own_step
            )
            differences += [found for found in numeric if found.stage not in {d.stage for d in differences}]
        return self._report(
            stages=judgement.results(),
            unseen=self._unseen(jax),
            losses=self._losses(torch),
            differences=tuple(differences),
            numerics=results,
            free_running=free,
        )

    def _by_themselves(self) -> None:
        """Torch's run, which is the reference, and jax's, side by side."""
        case = self._case
        reference = Steps(
            case.torch_source,
            "float64",
            case.world_size,
            case.steps,
            self._path("torch64"),
            self._start,
            ahead=case.steps * LOOK_AHEAD,
        )
        with self._noting("flax"):
            self._workers.jax.start(Free(case, self._start, self._path("free")))
        with self._noting("torch"):
            self._summary = self._workers.torch.do(reference)[0]
        with self._noting("flax"):
            self._workers.jax.wait()

    def _float32(self) -> None:
        """Both sides once more, forced by the same reference, in float32."""
        case = self._case.with_dtype("float32")
        ranks = [rank_folder(self._path("torch64"), rank) for rank in range(case.world_size)]
        start = {name: x.astype("float32") if x.dtype.kind == "f" else x for name, x in self._start.items()}
        forced = Steps(
            case.torch_source, "float32", case.world_size, case.steps, self._path("torch32"), start, reference=ranks
        )
        with self._noting("flax"):
            self._workers.jax.start(Forced(case, start, self._path("torch64"), self._path("jax32")))
        with self._noting("torch"):
            self._workers.torch.do(forced)
        with self._noting("flax"):
            self._workers.jax.wait()

    def _different_starts(self) -> list[Difference]:
        """Replicas that the port itself lets start from different weights."""
        if not self._facts.own_start:
            return []
        found: dict[str, float] = {}
        with self._noting("flax"):
            found = self._workers.jax.do(Starts(self._case, self._start))
        if not found:
            return []
        tensor = max(found, key=lambda name: found[name])
        says = f"the replicas start from different weights, in {len(found)} tensors"
        cause = Cause.of(("different_start",), (says,), 0.0)
        return [Difference("params", 0, tensor, found[tensor], 0.0, cause=cause, detail="before the first step")]

    def _free_running(self, torch: Records) -> dict[str, StageResult]:
        """How far jax by itself has gone from torch by itself, of the distance from the start."""
        steps: dict[str, list[float]] = {"params": [], "buffers": []}
        for ours, theirs in zip(self._jax("free"), torch, strict=False):
            for stage, found in steps.items():
                if theirs[stage]:
                    by_tensor = residuals(ours[stage], theirs[stage], self._start)
                    found.append(max(by_tensor.values()))
        return {stage: StageResult(FREE_ALLOWED, tuple(found)) for stage, found in steps.items() if found}

    def _losses(self, torch: Records) -> tuple[tuple[float, float], ...]:
        free = self._jax("free")
        count = max(len(torch), len(free))
        return tuple((_mean_loss(torch, step), _mean_loss(free, step)) for step in range(count))

    def _not_a_number(self, torch: Records, jax: Records) -> None:
        for side, records in (("torch", torch), ("flax", jax)):
            for step in range(len(records)):
                if not math.isfinite(_mean_loss(records, step)):
                    self._problems.append(Problem(side, f"step {step + 1}", "the loss is not a finite number"))
                    break

    def _unseen(self, jax: Records) -> tuple[str, ...]:
        shown = set(jax[0]) if len(jax) else set(ORDER)
        if self._facts.clip_grad_norm is None:
            shown.add("clipped_gradients")
        return tuple(stage for stage in ORDER if stage in ("gradients", "clipped_gradients") and stage not in shown)

    def _report(self, **found: object) -> Report:
        return Report(
            self._case.name,
            self._case.world_size,
            self._case.steps,
            self._case.dtype,
            problems=tuple(self._problems),
            environment=environment(),
            **found,  # type: ignore[arg-type]
        )

    @contextmanager
    def _noting(self, side: str) -> Iterator[None]:
        """A side that fails costs its part of the report, and no more."""
        try:
            yield
        except ChildError as error:
            if side == "flax":
                self._workers.end_jax()
            where = error.where if error.child == side else f"{error.child}, {error.where}"
            self._problems.append(Problem(side, where, error.what))

    def _path(self, name: str) -> Path:
        return self._scratch.path / name

    def _torch(self, name: str) -> Records:
        return torch_records(self._path(name), self._case.world_size)

    def _jax(self, name: str) -> Records:
        return jax_records(self._path(name))


def _mean_loss(records: Records, step: int) -> float:
    if step >= len(records):
        return math.nan
    record = records[step]
    return float(np.mean(record["pure_local_loss" if "pure_local_loss" in record else "local_loss"]["loss"]))
