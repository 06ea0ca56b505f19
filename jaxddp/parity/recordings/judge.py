"""Judge each stage of each recorded step, given its inputs.

Each side runs by itself, so a difference grows from step to step. A loss or a gradient is judged only at steps that
both sides begin with the same parameters and examples, up to rounding, and is allowed what the parameters' difference
may make of it.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxddp.parity.compare.judge import Located, hyperparameters_apart, largest, states_apart
from jaxddp.parity.compare.residuals import residuals
from jaxddp.parity.fingerprints import differing_share
from jaxddp.parity.recordings.aligned import Alignment, norms_of_torch, total_norm
from jaxddp.parity.recordings.judgement import TIPPED, RecordedJudgement
from jaxddp.parity.recordings.outside import OutsideChanges
from jaxddp.parity.recordings.run import RecordedStep, Recording
from jaxddp.parity.recordings.running_means import running_means
from jaxddp.parity.recordings.samples import Numbers, dealt_otherwise
from jaxddp.parity.records import Tensors, relative, stage_norm

# Largest residual that counts as equal, in units of the precision in which the less precise side computes.
ALLOWED = {
    "local_loss": 100.0,  # measured: up to 9
    "local_gradients": 500.0,  # measured: up to 20
    "gradients": 500.0,  # measured: up to 20
    "buffers": 200.0,  # measured: up to 2
    "optimizer_state": 4000.0,  # measured: up to 20
    "update": 1e5,  # if it is not replayed; measured: up to 60, and 14,000 where rounding tips a ReLU over
    "params": 100.0,  # of the first step; measured: 0
}
# Norm of a gradient that is all rounding, such as that of a bias in front of BatchNorm, over the norm of all gradients,
# in units of the precision; measured: up to 2. Adam makes a full step of such a gradient.
NOISE = 50.0
# Of learning rates, over the highest so far: either side may compute a curve in float32; measured: up to 6e-8.
ALLOWED_RATE = 1e-6
# A loss or gradient may differ by this multiple of what the parameters differ by; measured: up to 6.
GROWTH = 100.0
# The same of what the parameters differ by relative to how far they have moved, times what the loss has changed by
# since the start, relative to it; measured: up to 2.
MOVED_GROWTH = 10.0
# The second of these, if gradients pass through kinks; measured: up to 26.
KINKED_GROWTH = 100.0
# Share of the norm of all gradients from which a gradient that passes through kinks is large; measured in ResNet-18s: a
# tip moves 4 to 14 of the 17 to 19 that are.
LARGE = 0.05
GRADIENTS = ("local_gradients", "gradients")
BEHIND_KINKS = (*GRADIENTS, "optimizer_state", "update")
LOOSE = 0.1  # residual beyond which nothing is judged if it would be allowed
MOST_APART = 1e-3  # relative difference of the parameters beyond which losses and gradients are not judged


class Judge:
    """Comparison of two recordings, step by step.

    Args:
        torch_run, jax_run: the recordings.
        alignment: the tensors of both; None: their names do not pair off.
        examples: the examples of both sides at each common step.

    Attributes:
        outside: what changes the parameters outside of the updates; None: without an alignment.
    """

    def __init__(
        self, torch_run: Recording, jax_run: Recording, alignment: Alignment | None, examples: tuple[Numbers, Numbers]
    ):
        self._torch, self._jax, self._examples = torch_run, jax_run, examples
        self._epsilon = max(torch_run.epsilon, jax_run.epsilon)
        numbers = sorted(torch_run.steps.keys() & jax_run.steps.keys())
        steps = [torch_run.steps[n] for n in numbers]
        kinked = steps[0].notes.get("kinked")
        behind = None if kinked is None else frozenset(kinked)
        noise = _noise(steps, self._epsilon)
        self._judgement = RecordedJudgement(numbers, noise=noise, kinked=behind)
        self._replayed = replayed(numbers, jax_run)
        self.outside: OutsideChanges | None = None
        self._means: dict[str, dict[int, np.ndarray | None]] = {}
        if alignment is not None:
            self.outside = OutsideChanges(alignment, torch_run, jax_run, numbers, noise).found_in_updates()
            self._means = running_means(self.outside)

    def judge(self) -> RecordedJudgement:
        """Compare all stages, and updates with torch's own unless the reference's optimizer is replayed for them."""
        judgement, highest = self._judgement, 0.0  # learning rate of torch so far
        for index, number in enumerate(judgement.numbers):
            torch, jax = self._torch.steps[number], self._jax.steps[number]
            share = 0.0
            if self._examples[0][index]:
                share = differing_share(self._examples[0][index], self._examples[1][index])
                if dealt_otherwise(torch, jax):
                    share = 1.0
                judgement.note("samples", index, {"examples": share}, 0.0, True)
            judgement.same_examples.append(share == 0)
            highest = max(highest, float(torch.notes["groups"][0]["lr"]))
            rates = hyperparameters_apart(torch.notes["groups"][0], jax.hyperparameters, highest)
            judgement.note("hyperparameters", index, rates, ALLOWED_RATE, True)
            self._start_of(index, torch, jax)
            self._loss_of(index, torch, jax)
            if self.outside is not None:
                for stage, of_tensors in self._stages(self.outside, torch, jax, index):
                    rounding = self._epsilon * coarseness(jax) if stage == "update" else 0.0
                    if stage == "update" and number in self._replayed:
                        judgement.direct[number] = (of_tensors, *self._allowance(stage, index, rounding=rounding))
                    else:
                        self._given(stage, index, of_tensors, rounding=rounding)
                of_tensors, allowed = self.outside.residuals(number)
                if (is_hidden := self.outside.is_hidden(number)) and of_tensors:
                    judgement.leave_out("outside_changes", number, "not all steps around are recorded")
                judgement.note("outside_changes", index, of_tensors, allowed, not is_hidden)
        return judgement

    def _start_of(self, index: int, torch: RecordedStep, jax: RecordedStep) -> None:
        """Compare the parameters before a step; those before the first must be equal."""
        judgement = self._judgement
        if self.outside is None or not jax["params"]:
            for series in (judgement.apart, judgement.moved, judgement.drift):
                series.append(math.nan)
            return
        alignment, params = self.outside.alignment, self.outside.params(jax.number)
        noise = judgement.noise if jax.number > 1 else frozenset()
        both = {n: x for n, x in alignment.of_torch(torch["params"]).items() if n in params and n not in noise}
        apart = stage_norm({n: params[n].astype(float) - x for n, x in both.items()})
        judgement.apart.append(relative(apart, stage_norm(both)))
        first = alignment.of_torch(self._torch.steps[judgement.numbers[0]]["params"])
        way = stage_norm({n: x.astype(float) - first[n] for n, x in both.items() if n in first})
        judgement.moved.append(apart / way if index and way else 0.0)
        of_tensors = residuals(params, both)
        judgement.drift.append(max(of_tensors.values(), default=math.nan))
        allowed = ALLOWED["params"] * self._epsilon
        is_judged = index == 0 or judgement.drift[-1] <= allowed
        judgement.note("params", index, of_tensors, allowed, is_judged)
        if not is_judged:
            why = "rounding has moved them apart, and what changes them is judged"
            judgement.leave_out("params", jax.number, why)

    def _loss_of(self, index: int, torch: RecordedStep, jax: RecordedStep) -> None:
        one, other = (step["local_loss"]["loss"] for step in (jax, torch))
        if one.shape != other.shape or (one == one[0]).all():  # under jit every process has the loss of all examples
            one, other = one.mean(keepdims=True), other.mean(keepdims=True)
        begin = float(self._torch.steps[self._judgement.numbers[0]]["local_loss"]["loss"].mean())
        changed = relative(abs(float(other.mean()) - begin), abs(float(other.mean())))
        self._given("local_loss", index, residuals({"loss": one}, {"loss": other}), changed)

    def _stages(
        self, outside: OutsideChanges, torch: RecordedStep, jax: RecordedStep, index: int
    ) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield (stage, residuals) of what follows from parameters and examples."""
        alignment = outside.alignment
        local = alignment.of_jax(jax["local_gradients"]), alignment.of_torch(torch["local_gradients"], axes=1)
        if local[0] and local[1] and self._torch.world_size == self._jax.world_size:
            yield "local_gradients", _against(*local)
        if jax["gradients"]:
            of_tensors = _against(alignment.of_jax(jax["gradients"]), alignment.of_torch(torch["gradients"]))
            of_tensors = largest(of_tensors, _norms_apart(alignment, torch, jax))
            yield "gradients", largest(of_tensors, alignment.projections_apart(torch, jax, "gradients"))
        if jax["update"]:
            updates = outside.update(jax.number), alignment.of_torch(torch["update"])
            noise = self._judgement.noise
            of_tensors = _against(*({n: x for n, x in side.items() if n not in noise} for side in updates))
            of_whole = {} if jax.number in self._replayed else outside.updates_apart(torch, jax)
            yield "update", largest(of_tensors, {n: x for n, x in of_whole.items() if n in of_tensors})
        if jax["buffers"] and torch["buffers"]:
            buffers = alignment.of_jax(jax["buffers"]), alignment.of_torch(torch["buffers"])
            yield "buffers", self._of_buffers(*buffers, index)
        if jax["optimizer_state"]:
            states, kind = alignment.states_of_jax(jax["optimizer_state"]), str(self._torch.header["optimizer"])
            added = torch["optimizer_state_changes_after"]  # before torch's recorder was called, and maybe after jax's
            changed = {name: x + added.get(name, 0.0) for name, x in torch["optimizer_state"].items()}
            candidates = [changed, *[torch["optimizer_state"]] * (bool(added) and jax.number + 1 in self._torch.steps)]
            choices = [
                states_apart(states, alignment.states_of_torch(of_torch), kind, whole=False) for of_torch in candidates
            ]
            yield "optimizer_state", min(choices, key=lambda choice: max(choice.values(), default=0.0))

    def _of_buffers(self, jax: Tensors, torch: Tensors, index: int) -> dict[str, float]:
        """Return the residuals of buffers, without what biases explain that no loss sees, once they have moved."""
        shown = {name: x for name, x in torch.items() if name in jax}
        of_tensors = _against(jax, shown)
        number = self._judgement.numbers[index]
        for name, remaining in self._means.items() if number > 1 else ():
            if of_tensors.get(name, 0.0) <= ALLOWED["buffers"] * self._epsilon:
                continue
            rest = remaining.get(number)
            if rest is None:
                del of_tensors[name]
                why = f"{name} follows biases before it, whose gradients are rounding"
                self._judgement.leave_out("buffers", number, why if number in remaining else f"{why}, over a gap")
            else:
                of_tensors |= {name: residuals({**jax, name: shown[name] + rest}, shown)[name]}
        return of_tensors

    def _allowance(self, stage: str, index: int, changed: float = 1.0, rounding: float = 0.0) -> tuple[float, str]:
        """Return the largest residual that counts as equal at a step, and why it is not judged by it; "": it is."""
        judgement = self._judgement
        apart = judgement.apart[index]
        allowed = ALLOWED[stage] * self._epsilon + rounding
        if not judgement.same_examples[index]:
            return allowed, "the examples differ"
        if math.isnan(apart):
            return allowed, "jax shows no parameters before the step"
        if apart > MOST_APART:
            return allowed, "the parameters have drifted apart"
        if stage in ("optimizer_state", "update"):  # it sums up all steps before
            if not all(judgement.same_examples):
                return allowed, "the examples of a step before differ"
            if judgement.tips:
                return allowed, "rounding has tipped units over in a step before"
        moved = KINKED_GROWTH if judgement.kinked and stage in BEHIND_KINKS else MOVED_GROWTH
        allowed += GROWTH * apart + moved * judgement.moved[index] * changed
        return allowed, "" if allowed <= LOOSE else "the parameters have drifted apart"

    def _given(
        self, stage: str, index: int, of_tensors: Mapping[str, float], changed: float = 1.0, rounding: float = 0.0
    ) -> None:
        judgement, number = self._judgement, self._judgement.numbers[index]
        judgement.allowed.setdefault(stage, ALLOWED[stage] * self._epsilon + rounding)
        allowed, why_not = self._allowance(stage, index, changed, rounding)
        if of_tensors and why_not:
            judgement.leave_out(stage, number, why_not)
        elif stage in (*GRADIENTS, "update") and self._is_tip(index, of_tensors, allowed):
            allowed = TIPPED
            judgement.tips.setdefault(stage, []).append(Located.worst(number, of_tensors, allowed))
        judgement.note(stage, index, of_tensors, allowed, not why_not)

    def _is_tip(self, index: int, of_tensors: Mapping[str, float], allowed: float) -> bool:
        """Return whether only gradients that pass through kinks differ, all by little, and some large one does not."""
        kinked = self._judgement.kinked
        beyond = {name for name, residual in of_tensors.items() if residual > allowed}
        if not kinked or not beyond or max(of_tensors.values()) > TIPPED:
            return False
        norms = norms_of_torch(self._torch.steps[self._judgement.numbers[index]], "gradients")
        total = math.hypot(*norms.values())
        large = {name for name, norm in norms.items() if name in kinked & of_tensors.keys() and norm >= LARGE * total}
        return beyond <= kinked and not large <= beyond


def coarseness(step: RecordedStep) -> float:
    """Return what an update that is a difference of parameters loses, in units of their precision."""
    size = total_norm(step, "update")
    return total_norm(step, "params") / size if step.notes.get("update") == "difference" and size else 0.0


def _noise(steps: Sequence[RecordedStep], epsilon: float) -> frozenset[str]:
    """Return the parameters whose gradient is all rounding at every step."""
    found = {*steps[0]["gradients"]}
    for step in steps:
        norms = norms_of_torch(step, "gradients")
        total = math.hypot(*norms.values())
        found &= {name for name, norm in norms.items() if norm <= NOISE * epsilon * total}
    return frozenset(found)


def _against(jax: Tensors, torch: Tensors) -> dict[str, float]:
    """Return residuals of torch's tensors that JAX shows; a tensor that only JAX has must be 0."""
    both = {name: x for name, x in torch.items() if name in jax}
    unused = {name: np.zeros_like(x) for name, x in jax.items() if name not in torch}
    return residuals(jax, {**both, **unused})


def _norms_apart(alignment: Alignment, torch: RecordedStep, jax: RecordedStep) -> dict[str, float]:
    """Return by how much the norms of excerpts' whole tensors differ, relative to the norm of all gradients."""
    of_torch, of_jax = norms_of_torch(torch, "gradients"), alignment.norms_of_jax(jax, "gradients")
    scale = math.hypot(*of_torch.values())
    both = [name for name in of_torch if name in of_jax]
    return {name: relative(abs(of_torch[name] - of_jax[name]), scale) for name in both}


def replayed(numbers: Sequence[int], jax_run: Recording) -> list[int]:
    """Return the steps for which torch's optimizer can be replayed on JAX's gradients: all from the first on."""
    steps = [jax_run.steps[number] for number in contiguous(numbers)]
    shown = itertools.takewhile(lambda step: step["gradients"] and step["update"] and step["params"], steps)
    return [step.number for step in shown]


def contiguous(numbers: Sequence[int]) -> list[int]:
    """Return the steps from the first of the run on, up to the first gap.

    >>> contiguous([1, 2, 3, 10]), contiguous([5, 6])
    ([1, 2, 3], [])
    """
    return [number for place, number in enumerate(numbers, start=1) if number == place]
