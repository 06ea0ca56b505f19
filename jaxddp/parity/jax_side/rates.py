"""Comparison of the learning rates of a port's optax chain with torch's, at every step of a schedule.

With its other state held fixed, a right update at step t is lr(t) / lr(s) times that at step s of the run, in which
both sides are equal. So the updates are compared with these, whatever the chain is made of.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import jax
import numpy as np

from jaxddp.parity.case_interface import AnyCase
from jaxddp.parity.compare.rates import is_float32
from jaxddp.parity.jax_side.checked_step import side_of
from jaxddp.parity.jax_side.multi_loss_step import MultiLossStep
from jaxddp.parity.jax_side.update_response import (
    ROWS,
    Program,
    Response,
    counts_nothing,
    programs_of,
    response_of,
)
from jaxddp.parity.jax_side.update_sample import Sample, sampled
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.processes import Tell, free_at_once
from jaxddp.parity.rate_curves import (
    ALLOWED,
    UPDATE,
    RateDifference,
    RatesComparison,
    TorchRates,
    apart,
    at,
    chunks,
    compare_numbers,
)
from jaxddp.parity.records import is_large_model

ROUNDED = 1e-4  # of the highest rate, for a schedule in float32; measured: 6e-5 (0.9999 ** t up to step 20,000)
ROUNDINGS = 10  # errors of rounding of a parameter that a comparison of its updates has room for
MOST_OWNERS = 8  # classes with counts, of which all subsets are tried
# Names of hyperparameters in optax -> in torch's groups, and in words.
RATE = "learning_rate"
SHOWN = {
    RATE: ("lr", "learning rate"),
    "momentum": ("momentum", "momentum"),
    "b1": ("beta1", "beta1"),
    "b2": ("beta2", "beta2"),
    "weight_decay": ("weight_decay", "weight decay"),
}


@dataclass(frozen=True)
class CompareRates:
    """A job that compares a port's rates with torch's.

    Attributes:
        case: model or port.
        start: initial weights of the reference.
        torch: torch's rates.
    """

    case: AnyCase
    start: Arrays
    torch: TorchRates

    def run(self, tell: Tell) -> RatesComparison:
        """Return the result of the comparison."""
        tell("the optimizer's schedule")
        if is_large_model(self.start):
            free_at_once()
        result = RatesComparison(self.torch.last, constant=self.torch.is_constant)
        result.alone = getattr(getattr(self.case, "port", None), "jax_step", None) is None
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            side = side_of(self.case)
            several = isinstance(side.replica_step, MultiLossStep)
            sample = sampled(side, self.start, self.torch.groups)
            trained = [name for group in self.torch.groups for name in group]
            for program in programs_of(self.case, side, self.start, trained):
                if self.torch.is_constant and counts_nothing(jax.eval_shape(program.init)):
                    continue
                result.constant = False
                tell("the optimizer at every step")
                chosen, response = looked_at(program, sample)
                if several and all(map(response.corrects, response.owners)):
                    if not self.torch.is_constant:
                        result.leave_out("Rates that the jax_step may change by itself were not compared.")
                    continue
                OptimizerComparison(self.torch, chosen, response, result, self.case.steps).compare()
        return result


def looked_at(program: Program, sample: Sample) -> tuple[Sample, Response]:
    """Return the elements of the parameters that an optimizer updates, and its response."""
    updates, _ = jax.eval_shape(program.step, program.gradients(0), jax.eval_shape(program.init), program.params)
    chosen = sample.of(updates)
    return chosen, response_of(program, chosen.elements)


class OptimizerComparison:
    """Compare the updates of one jax optimizer with those that torch's learning rates imply.

    Args:
        torch: torch's rates.
        sample: the elements whose updates are compared.
        response: their updates by step.
        result: gets the differences.
        run: number of steps of the check's run, in which both sides are equal.
    """

    def __init__(self, torch: TorchRates, sample: Sample, response: Response, result: RatesComparison, run: int):
        self._torch, self._sample, self._response, self._result = torch, sample, response, result
        self._steps = response.steps(torch.steps)
        if torch.last is not None:  # the first update at or after the end is still before it
            result.last = torch.last + response.period - 1
        self._of_run = self._steps[self._steps < run]
        self._groups = [int(group) for group in np.unique(sample.groups)]
        self._peaks = {group: np.maximum.accumulate(np.abs(torch.lr[group])) for group in self._groups}
        # The step of the run with the highest rate, by group.
        rates = {group: np.abs(torch.at(group, self._of_run)) for group in self._groups}
        self._references = {group: int(self._of_run[np.argmax(x)]) for group, x in rates.items() if len(x)}
        self._expected = self._scales = np.zeros(len(sample.groups))

    def compare(self) -> None:
        """Compare all steps."""
        if len(self._of_run) < 2:
            self._result.leave_out("The rates after this run were not compared: it has too few updates.")
            return
        owners = self._owners_of_rate()
        if owners is not None:
            self._compare_updates(owners)
        elif not self._compare_shown():
            self._result.leave_out(
                "The rates after this run were not compared: in it the port's updates do not follow torch's learning "
                "rate by a factor."
            )

    def _owners_of_rate(self) -> tuple[str, ...] | None:
        """Return the classes whose counts drive the rate: as many as follow torch's rates over the run; None: none do.

        The others drive bias corrections: with their counts set to the run's steps, the updates are not lr(t) u.
        """
        owners = self._response.owners
        for size in range(min(len(owners), MOST_OWNERS), -1, -1):
            for chosen in combinations(owners, size):
                if self._follows(self._response.updates(self._of_run, chosen)[0]):
                    return chosen
        return None

    def _follows(self, updates: np.ndarray) -> bool:
        """Expect updates in proportion to the run's, (n, elements); return whether these follow torch's rates."""
        groups, tensors = self._sample.groups, self._sample.tensors
        places = {group: int(np.flatnonzero(self._of_run == self._references[group])[0]) for group in self._groups}
        self._expected = np.asarray([updates[places[int(group)], k] for k, group in enumerate(groups)])
        largest = {name: np.abs(self._expected[tensors == name]).max() for name in np.unique(tensors)}
        rounding = {name: self._response.rounding[tensors == name].max() for name in largest}
        exact = {name for name, size in largest.items() if ROUNDINGS * rounding[name] <= ALLOWED * size}
        self._scales = np.asarray([largest[name] if name in exact else 0.0 for name in tensors])
        shows = self._scales.any() or not self._expected.any()
        return bool(shows and (self._residuals(self._of_run, updates) <= ALLOWED).all())

    def _compare_updates(self, owners: tuple[str, ...]) -> None:
        others = [x for x in self._response.owners if x not in owners and not self._response.corrects(x)]
        if others:
            name = others[0].rpartition(".")[2] or "the optimizer's state"
            self._result.leave_out(
                f"The rates after this run were not compared: the count of {name} drives more than the learning rate."
            )
            return
        for part in chunks(len(self._steps), ROWS):
            self._note(self._steps[part], self._response.updates(self._steps[part], owners)[0])
        for group in self._groups:
            if names := self._torch.changing(group):
                self._not_followed(names)

    def _note(self, steps: np.ndarray, updates: np.ndarray) -> None:
        residuals = self._residuals(steps, updates)
        self._forgive_others(steps, residuals)
        self._forgive_rounding(steps, updates, residuals)

        def difference(place: int) -> RateDifference:
            return self._difference(int(steps[place]), updates[place], residuals[place])

        self._result.note(steps, residuals.max(axis=1, initial=0.0), difference)

    def _residuals(self, steps: np.ndarray, updates: np.ndarray) -> np.ndarray:
        """Return |u(t) - lr(t) / lr(s) u(s)| of each element, relative to its tensor's largest so far."""
        residuals = np.zeros(updates.shape)
        for group in self._groups:
            mine = (self._sample.groups == group) & (self._scales > 0)
            reference = self._reference(group)
            if not reference:
                self._result.leave_out("The rates of a group whose rate is 0 in the whole run were not compared.")
                continue
            share = self._torch.at(group, steps) / reference
            peak = at(self._peaks[group], steps) / abs(reference)
            off = np.abs(updates[:, mine] - share[:, None] * self._expected[mine])
            residuals[:, mine] = off / (np.where(peak > 0, peak, 1.0)[:, None] * self._scales[mine])
        return np.nan_to_num(residuals, nan=np.inf)

    def _reference(self, group: int) -> float:
        return float(self._torch.at(group, np.asarray([self._references[group]]))[0])

    def _forgive_others(self, steps: np.ndarray, residuals: np.ndarray) -> None:
        """Leave out steps at which another torch number than the rate has changed, since jax's then has to."""
        for group in self._groups:
            mine = self._sample.groups == group
            late = steps >= self._torch.changes_from(group, self._references[group])
            rows = np.flatnonzero(late & (residuals[:, mine] > ALLOWED).any(axis=1))
            residuals[np.ix_(rows, np.flatnonzero(mine))] = 0.0

    def _forgive_rounding(self, steps: np.ndarray, updates: np.ndarray, residuals: np.ndarray) -> None:
        """Allow for rates that are float32 numbers, as in a port that computes its schedule in float32."""
        worst = residuals.max(axis=1, initial=0.0)
        for row in np.flatnonzero((worst > ALLOWED) & (worst <= ROUNDED)):
            at = self._difference(int(steps[row]), updates[row], residuals[row])
            reference = self._reference(int(self._sample.groups[int(np.argmax(residuals[row]))]))
            if at.quantity != UPDATE and is_float32(abs(at.jax / reference) * float(np.float32(abs(reference)))):
                residuals[row] = np.minimum(residuals[row], ALLOWED)

    def _not_followed(self, names: list[str]) -> None:
        words = " and ".join(word for name, word in SHOWN.values() if name in names)
        self._result.leave_out(f"torch's {words} follows a schedule, with which jax's was not compared after this run.")

    def _difference(self, step: int, update: np.ndarray, residuals: np.ndarray) -> RateDifference:
        worst = int(np.argmax(residuals))
        tensor, group = str(self._sample.tensors[worst]), int(self._sample.groups[worst])
        mine = self._sample.tensors == tensor
        factor, is_factor = as_factor(update[mine], self._expected[mine], self._scales[worst])
        rate = float(self._torch.at(group, np.asarray([step]))[0])
        quantity = "learning rate" if is_factor else UPDATE
        return RateDifference(step, tensor, quantity, rate, factor * self._reference(group), float(residuals[worst]))

    def _compare_shown(self) -> bool:
        """Compare the numbers that optax.inject_hyperparams shows; return whether they are those of the run."""
        group, shown, torch = self._groups[0], self._response.shown, self._torch
        if RATE not in shown or any(not np.array_equal(torch.lr[group], torch.lr[g]) for g in self._groups):
            return False
        known = {jax_name: names for jax_name, names in SHOWN.items() if self._has(jax_name, names[0])}
        numbers = [
            self._response.updates(self._steps[part], self._response.owners)[1]
            for part in chunks(len(self._steps), ROWS)
        ]
        curves = dict(zip(shown, np.concatenate(numbers).T, strict=True))
        pairs = {words: (self._curve(name), curves[of_jax]) for of_jax, (name, words) in known.items()}
        run = slice(len(self._of_run))
        if any((apart(x[run], y[run]) > ALLOWED).any() for x, y in pairs.values()):
            return False
        for words, pair in pairs.items():
            compare_numbers(self._result, words, str(self._sample.tensors[0]), self._steps, *pair)
        compared = {name for name, _ in known.values()}
        if names := [name for g in self._groups for name in torch.changing(g) if name not in compared]:
            self._not_followed(names)
        return True

    def _has(self, of_jax: str, of_torch: str) -> bool:
        of_group = self._torch.others[self._groups[0]]
        return of_jax in self._response.shown and (of_jax == RATE or of_torch in of_group)

    def _curve(self, name: str) -> np.ndarray:
        group = self._groups[0]
        return at(self._torch.lr[group] if name == "lr" else self._torch.others[group][name], self._steps)


@dataclass(frozen=True)
class CompareUpdates:
    """A job that compares a port's updates at some steps with those of torch's optimizer, element by element.

    Every count is set to the step on both sides; state and gradients are made, the same on both.

    Attributes:
        case: model or port.
        start: initial weights of the reference.
        torch: torch's rates.
        steps: the steps, ascending, those of the run first.
        updates: torch's updates by tensor, (steps, elements), see `jaxddp.parity.torch_side.updates_at`.
    """

    case: AnyCase
    start: Arrays
    torch: TorchRates
    steps: tuple[int, ...]
    updates: Mapping[str, np.ndarray]

    def run(self, tell: Tell) -> RatesComparison | None:
        """Return the result; None if not even the updates at the run's steps are equal."""
        tell("the optimizer at chosen steps")
        result, steps = RatesComparison(self.torch.last), np.asarray(self.steps)
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            side = side_of(self.case)
            sample = sampled(side, self.start, self.torch.groups)
            trained = [name for group in self.torch.groups for name in group]
            for program in programs_of(self.case, side, self.start, trained):
                chosen, response = looked_at(program, sample)
                if response.period != 1:
                    return None
                jax_updates = response.updates(steps, response.owners)[0]
                torch_updates = chosen.of_tensors(self.updates)
                if not self._compare(chosen, torch_updates, jax_updates, result):
                    return None
        return result

    def _compare(self, chosen: Sample, torch: np.ndarray, jax: np.ndarray, result: RatesComparison) -> bool:
        largest = np.stack([np.abs(torch[:, chosen.tensors == name]).max(axis=1) for name in chosen.tensors], axis=1)
        scale = np.maximum.accumulate(largest, axis=0)
        steps = np.asarray(self.steps)
        residuals = np.nan_to_num(np.abs(jax - torch) / np.where(scale > 0, scale, 1.0), nan=np.inf)
        if not (residuals[steps < self.case.steps] <= ALLOWED).all():
            return False

        def difference(place: int) -> RateDifference:
            worst = int(np.argmax(residuals[place]))
            mine = chosen.tensors == chosen.tensors[worst]
            group, step = int(chosen.groups[worst]), steps[[place]]
            rate = float(self.torch.at(group, step)[0])
            factor, is_factor = as_factor(jax[place, mine], torch[place, mine], float(scale[place, worst]))
            quantity = "learning rate" if is_factor else UPDATE
            of_tensor = int(step[0]), str(chosen.tensors[worst]), quantity
            return RateDifference(*of_tensor, rate, factor * rate, float(residuals[place, worst]))

        result.note(steps, residuals.max(axis=1), difference)
        return True


def as_factor(update: np.ndarray, expected: np.ndarray, scale: float) -> tuple[float, bool]:
    """Return the factor by which an expected update (n,) is nearest to another, and whether they differ only by it."""
    square = float(expected @ expected)
    factor = float(expected @ update) / square if square else 0.0
    return factor, bool(np.abs(update - factor * expected).max() <= ALLOWED * scale * max(1.0, abs(factor)))
