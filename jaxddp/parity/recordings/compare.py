"""Compare a recording of torch with one of JAX: what differs, where it begins, and why, as far as the files show it."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxddp.errors import InputError, listed
from jaxddp.parity.catalogue import TorchOptimizer
from jaxddp.parity.compare.clipping import NOT_CLIPPED
from jaxddp.parity.compare.examples import examples_in_words
from jaxddp.parity.compare.judge import Located, largest
from jaxddp.parity.diagnosis.as_differences import causes_of, next_best
from jaxddp.parity.diagnosis.search.decide import Ruling
from jaxddp.parity.environment import environment
from jaxddp.parity.findings import ORDER, Cause, Difference, Problem, StageResult
from jaxddp.parity.port.rules import Names
from jaxddp.parity.recordings import causes
from jaxddp.parity.recordings.aligned import Alignment
from jaxddp.parity.recordings.clipping_rule import clipping_of
from jaxddp.parity.recordings.judge import ALLOWED, MOST_APART, Judge, contiguous, replayed
from jaxddp.parity.recordings.names import Twins, find_twins
from jaxddp.parity.recordings.outside import OutsideChanges
from jaxddp.parity.recordings.own_updates import changed_state, foreign_cause, foreign_update
from jaxddp.parity.recordings.remarks import are_paired, outside_cause, problems, remarks, start_cause, unseen
from jaxddp.parity.recordings.run import EPSILONS, Recording
from jaxddp.parity.recordings.samples import dealt_otherwise, numbered
from jaxddp.parity.report.report import Report

NEEDS = (
    "a replay of the loss, which a recording does not hold: put both models and losses into a program, "
    "jaxddp check PROGRAM.py"
)
NEEDS_GRADIENTS = (
    "the gradients of all steps from the first on, from which torch's optimizer is replayed: give grads to jax's step"
)


def compare_runs(torch_run: str | Path, jax_run: str | Path, names: Names | None = None) -> Report:
    """Compare two recordings of `jaxddp.parity.Recorder`.

    Args:
        torch_run, jax_run: folders of the recordings.
        names: JAX's names to torch's, as in a program; None: they are paired by names, shapes, order and values.

    Returns:
        The report, in the form of a check's: `str(report)` is text, `report.verdict` "equal", "different" or
        "incomplete".

    Raises:
        InputError: a folder is missing, damaged or not a recording of its side; or the two share no step.

    >>> import jax, tempfile, torch
    >>> from jaxddp.parity import Recorder
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> params = {"kernel": model.weight.detach().numpy().T.copy()}
    >>> x = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     recorder = Recorder(f"{folder}/torch", steps=1)
    ...     recorder.watch(model, optimizer)
    ...     loss = model(x).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     recorder.step({"x": x}, loss)
    ...     recorder = Recorder(f"{folder}/jax", steps=1)
    ...     recorder.watch(params)
    ...     loss_of = lambda params: ((x.numpy() @ params["kernel"]) ** 2).mean()
    ...     loss, grads = jax.value_and_grad(loss_of)(params)
    ...     updates = jax.tree.map(lambda g: -0.1 * g, grads)
    ...     recorder.step({"x": x.numpy()}, loss, grads=grads, updates=updates)
    ...     compare_runs(f"{folder}/torch", f"{folder}/jax", {"kernel": "weight"}).verdict
    'equal'
    """
    with np.errstate(all="ignore"):  # runs may diverge
        return Comparison(Recording(Path(torch_run)), Recording(Path(jax_run)), names).report()


class Comparison:
    """One comparison of two recordings.

    Args:
        torch_run, jax_run: the recordings.
        names: see `compare_runs`.

    Raises:
        InputError: the recordings cannot be compared.
    """

    def __init__(self, torch_run: Recording, jax_run: Recording, names: Names | None):
        self._started = time.monotonic()
        for run, side in ((torch_run, "torch"), (jax_run, "jax")):
            if run.side != side:
                raise InputError(f"{run.folder}: is a recording of {run.side}; must be of {side}: TORCH_RUN JAX_RUN")
        numbers = sorted(torch_run.steps.keys() & jax_run.steps.keys())
        if not numbers:
            of_each = (f"{run.folder} has {listed([*map(str, run.steps)], joint=', ')}" for run in (torch_run, jax_run))
            raise InputError(f"no step is in both recordings: {'; '.join(of_each)}")
        self._torch_run, self._jax_run = torch_run, jax_run
        self._torch, self._jax = ([run.steps[n] for n in numbers] for run in (torch_run, jax_run))
        self._epsilon = max(torch_run.epsilon, jax_run.epsilon)
        self._replicas = torch_run.world_size
        self._twins: Twins = find_twins(torch_run, jax_run, names)
        converter = self._twins.converter
        torch_run.summands += [] if converter is None else [x.summand for x in converter.pieces if x.summand]
        if large := [x.other for x in torch_run.summands if torch_run.shapes[x.first][0] > torch_run.limit]:
            raise InputError(f"{torch_run.folder}: {large[0]}: a sum of excerpts; must be recorded with a larger limit")
        self._alignment = None if converter is None else Alignment(converter, torch_run, jax_run)
        self._examples = numbered(self._torch, self._jax, self._replicas, self._epsilon)
        judge = Judge(torch_run, jax_run, self._alignment, self._examples)
        self._judgement, self._outside = judge.judge(), judge.outside
        self._problems = [*problems(self._twins, self._alignment, self._jax, self._examples)]
        self._clipping = clipping_of(self._torch)
        self._remarks: list[str] = []  # on torch's own updates
        self._given_rates = False  # whether updates are explained given jax's own learning rates

    def report(self) -> Report:
        """Return the report."""
        of_step = [*self._reduction(), *self._updates()]
        of_model = self._model([one.stage for one in of_step if one.cause])
        differences = [*self._start(), *self._samples(), *of_model, *of_step, *self._outside_changes()]
        if self._given_rates or not any(one.stage == "update" and one.cause for one in differences):
            differences += self._located("hyperparameters")
        if not differences and self._judgement.first:  # a stage that follows from equal ones
            differences += self._located(min(self._judgement.first, key=ORDER.index))
        order = ("params", *(stage for stage in ORDER if stage != "params"))  # the start comes first
        differences.sort(key=lambda one: order.index(one.stage))
        judgement, twins = self._judgement, self._twins
        torch_run, jax_run = self._torch_run, self._jax_run
        matter = bool(twins.problem or twins.by_order) and not are_paired(judgement)
        names = {key: str(value) for key, value in twins.names.items()} if matter else {}
        return Report(
            port=f"{torch_run.folder} {jax_run.folder}",
            world_size=self._replicas,
            steps=len(judgement.numbers),
            dtype=next(name for name, value in EPSILONS.items() if value == self._epsilon),
            stages=judgement.results(torch_run.shapes),
            unseen=tuple(unseen(self._jax, self._clipping)),
            free_running=self._drift(),
            losses=tuple((a.notes["loss"], b.notes["loss"]) for a, b in zip(self._torch, self._jax, strict=True)),
            differences=tuple(differences),
            problems=tuple(self._problems),
            names=names,
            idle=(*remarks(torch_run, jax_run, judgement, twins, self._clipping, self._outside), *self._remarks),
            left_out=judgement.stages_left_out(),
            seconds=time.monotonic() - self._started,
            environment=environment(),
        )

    def _start(self) -> Iterator[Difference]:
        """Yield a difference if both sides do not begin with the same parameters; it comes first."""
        located = self._judgement.first.get("params")
        if located is not None:
            detail = "losses and gradients are judged only where both begin a step with the same parameters"
            cause = start_cause(located, self._judgement.residuals["params"][0])
            yield _difference("params", located, cause, detail=detail)

    def _samples(self) -> Iterator[Difference]:
        located = self._judgement.first.get("samples")
        if located is None:
            return
        index = self._judgement.numbers.index(located.step)
        torch, jax = (side[index] for side in self._examples)
        if sizes := dealt_otherwise(self._torch[index], self._jax[index]):
            yield _difference("samples", located, detail=f"the replicas have {sizes}")
            return
        detail = examples_in_words(torch, jax)
        shapes = {x.shape for side in self._examples for step in side for x in step.values()}
        ruling = Ruling((), None)
        if contiguous(self._judgement.numbers) == self._judgement.numbers and len(shapes) == 1:
            ruling = causes.of_samples(self._examples)
        yield from self._explained("samples", located, ruling, detail)

    def _model(self, explained: list[str]) -> Iterator[Difference]:
        """Yield where the losses, the gradients or the buffers differ at equal inputs; their names need a replay."""
        first = self._judgement.first
        if "gradients" in explained:
            return
        stages = [stage for stage in ("local_loss", "local_gradients", "gradients") if stage in first]
        if stages:
            stage = min(stages, key=lambda one: (first[one].step, stages.index(one)))
            if "outside_changes" in first and first[stage].step >= first["outside_changes"].step:
                return  # losses of other parameters
            yield _difference(stage, first[stage], needs=NEEDS)
        elif "buffers" in first:
            yield _difference("buffers", first["buffers"], needs=NEEDS)

    def _reduction(self) -> Iterator[Difference]:
        """Yield a difference if JAX's gradients are not the mean of its local ones, or are a multiple of torch's."""
        if any(step["local_gradients"] and step["gradients"] for step in self._jax):
            shown = [step for step in self._jax if step["local_gradients"] and step["gradients"]]
            worst, ruling = causes.of_reduction(shown, self._jax_run.epsilon)
            allowed = causes.REDUCTION_ROUNDING * self._jax_run.epsilon
            if worst > allowed:
                located = Located(shown[0].number, "", worst, allowed)
                detail = "jax's gradients are not the mean of jax's local gradients"
                yield from self._explained("gradients", located, ruling, detail)
                return
        located_there = self._judgement.first.get("gradients")
        if located_there is None or self._alignment is None:
            return
        if (cause := causes.of_torch_reduction(self._torch, self._torch_run.epsilon)) is not None:
            detail = "torch's gradients are not the mean of torch's local gradients"
            yield _difference("gradients", located_there, cause, detail=detail)
            return
        numbers, apart = self._judgement.numbers, self._judgement.apart
        near = [
            i
            for i, n in enumerate(numbers)
            if n >= located_there.step and apart[i] <= 10 * ALLOWED["params"] * self._epsilon
        ]
        first = [numbers.index(located_there.step)]  # by itself too: a fault may move the parameters apart a little
        for chosen in (near, first) if len(near) > 1 else (first,):
            torch, jax = ([side[i] for i in chosen] for side in (self._torch, self._jax))
            ruling = causes.of_gradients(torch, jax, self._alignment, self._replicas, located_there.allowed)
            if ruling.named:
                yield from self._explained("gradients", located_there, ruling)
                return

    def _outside_changes(self) -> Iterator[Difference]:
        """Yield a difference if one side's parameters change outside of its updates, and the other's do not."""
        located = self._judgement.first.get("outside_changes")
        if located is not None and self._outside is not None:
            yield _difference("outside_changes", located, outside_cause(self._outside, located))

    def _updates(self) -> Iterator[Difference]:
        """Yield what differs of both sides' updates, with names where torch's optimizer is replayed."""
        numbers = replayed(self._judgement.numbers, self._jax_run)
        can_replay, foreign = foreign_update(self._torch_run, contiguous(self._judgement.numbers))
        plain = [number for number in numbers if can_replay and (foreign is None or number < foreign.step)]
        kind = self._torch_run.header["optimizer"]
        if not can_replay:
            self._remarks = [f"{kind} cannot be replayed, so updates are compared with torch's."]
        elif foreign is not None:
            says = f"torch's updates are not what its {kind} makes of its gradients and state"
            self._remarks = [f"From step {foreign.step} on {says}, and are compared with jax's as they are."]
        elif parts := changed_state(self._torch_run, self._judgement.numbers):
            self._remarks = [f"Torch changes its optimizer's state ({parts}) between steps, and no update shows it."]
        self._judge_directly([n for n in numbers if n not in plain and n in self._judgement.direct])
        replay = None if self._outside is None or not plain else self._replay(self._outside, plain)
        located = self._judgement.first.get("update")
        if located is None:
            return
        if foreign is not None and located.step >= foreign.step:
            yield _difference("update", located, foreign_cause(self._torch_run, foreign))
        elif replay is None or located.step not in numbers:
            yield _difference("update", located, needs=NEEDS_GRADIENTS)
        else:
            coarse = "updates are too small next to the parameters to find a cause; give updates to jax's step"
            detail = coarse if replay.ruling.cut_short else "given jax's own gradients and parameters"
            yield from self._explained("update", located, replay.ruling, detail)

    def _replay(self, outside: OutsideChanges, numbers: list[int]) -> causes.Updates | None:
        """Judge the updates of some steps by torch's optimizer, given JAX's own gradients; None: it is not possible."""
        judgement = self._judgement
        if self._clipping is None and not self._jax[0]["clipped_gradients"]:
            says = "torch changes its gradients before the optimizer by a rule that is not clipping by norm or value"
            self._problems.append(Problem("torch", "clipped_gradients", f"{says}; give clipped_grads to jax's step"))
            return None
        clipping = self._clipping or NOT_CLIPPED
        updates = causes.of_updates(outside, clipping, numbers)
        steps = [self._jax_run.steps[number].hyperparameters for number in numbers]
        rates = [shown["learning_rate"] for shown in steps if "learning_rate" in shown]
        has_rates = "hyperparameters" in judgement.first and len(rates) == len(numbers)
        if updates.residuals and not updates.ruling.named and has_rates:  # what else differs may have a name
            others = causes.of_updates(outside, clipping, numbers, rates)
            self._given_rates = bool(others.ruling.named) or not others.differ
            updates = others if self._given_rates else updates
        for number, of_step in zip(numbers, updates.residuals or (), strict=False):
            of_step = largest(of_step, self._unlike_in_whole(number, of_step))
            judgement.note("update", judgement.numbers.index(number), of_step, updates.floor, True)
        return updates

    def _unlike_in_whole(self, number: int, of_step: Mapping[str, float]) -> dict[str, float]:
        """Return the residuals of updates' projections, which no replay gives, beyond what an update is allowed."""
        of_tensors, allowed, why_not = self._judgement.direct.get(number, ({}, 0.0, "it is not compared"))
        before = self._judgement.first.get("gradients")  # from there on updates differ, whatever the optimizer does
        if why_not or self._outside is None or (before is not None and before.step <= number):
            return {}
        apart = self._outside.updates_apart(self._torch_run.steps[number], self._jax_run.steps[number])
        return {n: x for n, x in apart.items() if n in of_step and x > allowed >= of_tensors.get(n, math.inf)}

    def _judge_directly(self, numbers: Sequence[int]) -> None:
        """Judge updates by torch's where these are not those of a replay."""
        judgement = self._judgement
        for number in numbers:
            of_tensors, allowed, why_not = judgement.direct[number]
            of_tensors = largest(of_tensors, self._unlike_in_whole(number, of_tensors))
            judgement.note("update", judgement.numbers.index(number), of_tensors, allowed, not why_not)
        unjudged = [(number, why_not) for number in numbers if (why_not := judgement.direct[number][2])]
        if unjudged and "update" not in judgement.first:
            says = "update of step {} is not that of a replay, nor comparable: {}".format(*unjudged[0])
            self._problems.append(Problem("torch", "update", says))

    def _located(self, stage: str) -> list[Difference]:
        located, detail = self._judgement.first.get(stage), ""
        if located is None:
            return []
        if (stage, located.tensor) == ("hyperparameters", "learning_rate"):
            index = self._judgement.numbers.index(located.step)
            torch, jax = self._torch[index].notes["groups"][0]["lr"], self._jax[index].hyperparameters["learning_rate"]
            detail = f"learning rate {jax:.6g} at step {located.step}, the reference has {torch:.6g}"
        return [_difference(stage, located, detail=detail)]

    def _explained(self, stage: str, located: Located, ruling: Ruling, detail: str = "") -> Iterator[Difference]:
        """Yield a difference for each cause, or one without."""
        groups = self._torch[0].notes["groups"]
        optimizer = TorchOptimizer(str(self._torch_run.header["optimizer"]), groups)
        if not ruling.named:
            one = _difference(stage, located, None, detail=detail)
            yield replace(one, nearest=next_best(ruling, located.residual))
            return
        for cause in causes_of(ruling, optimizer, located.residual):
            yield _difference(stage, located, cause, detail=detail)

    def _drift(self) -> dict[str, StageResult]:
        """Return how far the parameters are apart at each step; beyond the limit, losses are not judged."""
        values = self._judgement.by_step(self._judgement.drift)
        return {"params": StageResult(MOST_APART, values)} if any(map(math.isfinite, values)) else {}


def _difference(
    stage: str, located: Located, cause: Cause | None = None, detail: str = "", needs: str = ""
) -> Difference:
    text = "; ".join(filter(None, [detail, located.detail]))
    return Difference(
        stage, located.step, located.tensor, located.residual, located.allowed, cause=cause, detail=text, needs=needs
    )
