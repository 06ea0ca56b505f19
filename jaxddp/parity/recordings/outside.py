"""Find changes of parameters that are not the optimizer's updates: clamps, resets, averages, loaded weights.

Each side is measured by itself. Torch's recorder looks at the parameters when a step ends and before and after the
optimizer's update; JAX's is given updates and parameters, and what is neither the one nor the rounding of the sum is a
change. A change belongs to the step whose update it follows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from jaxddp.parity.recordings.aligned import Alignment
from jaxddp.parity.recordings.run import RecordedStep, Recording
from jaxddp.parity.records import Tensors, relative, stage_norm

# Rounding of parameter + update, relative to both, in units of the parameter's precision; measured: up to 0.5.
ROUNDED = 4.0
# Changes may differ by this multiple of the difference of the parameters; measured: 1 for clamps, averages and resets.
FOLLOWS = 4.0
CLEARLY = 0.5  # of two explanations of updates the less plain one is taken if it leaves less than this share
BEFORE, AFTER = "params_changes_before", "params_changes_after"

Changes = dict[int, Tensors]


@dataclass
class OutsideChanges:
    """Changes of both sides' parameters outside of the updates, under torch's names.

    Args:
        alignment: the tensors of both sides.
        torch_run, jax_run: the recordings.
        numbers: steps that both have.
        noise: parameters whose gradients, and so whose updates, are rounding.

    Attributes:
        torch, jax: step -> tensor -> what was added to it between this step's update and the next.
        is_assumed: JAX's updates contain the changes, which are torch's.
        ahead: step -> what was added to JAX's parameters after they were given to the step before, and so is missing
            in this step's parameters.
    """

    alignment: Alignment
    torch_run: Recording
    jax_run: Recording
    numbers: Sequence[int]
    noise: frozenset[str] = frozenset()
    torch: Changes = field(default_factory=dict)
    jax: Changes = field(default_factory=dict)
    ahead: Changes = field(default_factory=dict)
    is_assumed: bool = False

    def __post_init__(self) -> None:
        self._precision = max(self.torch_run.parameter_epsilon, self.jax_run.parameter_epsilon)
        for number in self.numbers:
            torch = self.torch_run.steps[number]
            _add(self.torch, self._following(number), self.alignment.of_torch(torch[BEFORE]))
            _add(self.torch, number, self.alignment.of_torch(torch[AFTER]))
        for number in self.numbers:
            self._read_jax(number)

    def _read_jax(self, number: int) -> None:
        """Read a step's changes in JAX, which came before its update if torch's parameters have them by then."""
        step = self.jax_run.steps[number]
        added = self._beyond_rounding(step)
        if not added:
            return
        params = self.alignment.of_jax(step["params"])
        torch = self.alignment.of_torch(self.torch_run.steps[number]["params"])
        distance = stage_norm({name: torch[name] - params[name] for name in added})
        if stage_norm({name: torch[name] - params[name] - x for name, x in added.items()}) < distance:
            self.ahead[number] = added
            number = self._following(number) if number != self.numbers[0] else 0
        _add(self.jax, number, added)
        self.jax.pop(0, None)  # before the first step, where the parameters themselves are compared

    def _beyond_rounding(self, step: RecordedStep) -> Tensors:
        given, params = step[AFTER], step["params"]
        sizes = {name: np.abs(x) + np.abs(step["update"][name]) for name, x in params.items() if name in step["update"]}
        filled = {name: given.get(name, np.zeros_like(x)) for name, x in params.items()} if given else {}
        floor = ROUNDED * self.jax_run.parameter_epsilon
        beyond = {n: np.where(np.abs(x) > floor * sizes[n], x, 0.0) for n, x in filled.items() if n in sizes}
        return {name: x for name, x in self.alignment.of_jax(beyond).items() if x.any()}

    def _following(self, number: int) -> int:
        """Return the step whose update the changes before a step follow: the one before it, if that is recorded."""
        return number - 1 if number - 1 in self.numbers else number

    def found_in_updates(self) -> "OutsideChanges":
        """Return the changes with those that JAX's updates contain, if these are differences of its parameters."""
        shown = [step.notes.get("update") for step in self.jax_run.steps.values()]
        if not self.torch or "difference" not in shown:
            return self
        assumed = [self._assume(placement) for placement in ("after", "before")]
        distances = [changes._distance_of_updates() for changes in (self, *assumed)]
        nearest = min(range(3), key=distances.__getitem__)
        return assumed[nearest - 1] if distances[nearest] < CLEARLY * distances[0] else self

    def _assume(self, placement: Literal["after", "before"]) -> "OutsideChanges":
        """Return the changes as they are if JAX's parameters change like torch's.

        Args:
            placement: "after": before the recorder is given the parameters; "before": after that, so that the next
                step's update contains them.
        """
        assumed = OutsideChanges(self.alignment, self.torch_run, self.jax_run, self.numbers, self.noise)
        assumed.jax, assumed.is_assumed = dict(self.torch), True
        if placement == "before":
            following = {number: self.torch.get(number - 1, {}) for number in self.numbers}
            assumed.ahead = {number: added for number, added in following.items() if added}
        return assumed

    def _distance_of_updates(self) -> float:
        """Return the norm of all differences of both sides' updates."""
        distances = []
        for number in self.numbers:
            torch = self.alignment.of_torch(self.torch_run.steps[number]["update"])
            moves = {name: x - torch[name] for name, x in self.update(number).items() if name in torch}
            distances.append(stage_norm({name: x for name, x in moves.items() if name not in self.noise}))
        return math.hypot(*distances)

    def params(self, number: int) -> Tensors:
        """Return the parameters from which a step of JAX starts."""
        return _sums(self.alignment.of_jax(self.jax_run.steps[number]["params"]), self.ahead.get(number, {}))

    def update(self, number: int) -> Tensors:
        """Return the update that JAX's optimizer makes at a step."""
        update = self.alignment.of_jax(self.jax_run.steps[number]["update"])
        if not self.is_assumed:
            return update
        changes = self.ahead if self.ahead else self.jax
        update = _sums(update, {name: -x for name, x in changes.get(number, {}).items()})
        return {name: x for name, x in update.items() if name not in self.unknown}

    def updates_apart(self, torch: RecordedStep, jax: RecordedStep) -> dict[str, float]:
        """Return by how much the projections of whole updates differ; {} if anything else changes parameters."""
        return {} if self.torch or self.jax else self.alignment.projections_apart(torch, jax, "update")

    @property
    def unknown(self) -> frozenset[str]:
        """Parameters whose updates are not known: what changed them otherwise depends on values that are rounding."""
        changed = {name for changes in self.torch.values() for name in changes}
        return self.noise & changed if self.is_assumed else frozenset()

    def carried(self, number: int) -> float:
        """Return by how much torch's changes may differ from JAX's, relative to the update that they leave."""
        if not self.is_assumed:
            return 0.0
        torch = self.alignment.of_torch(self.torch_run.steps[number]["params"])
        drift = {name: x - torch[name] for name, x in self.params(number).items() if name not in self.noise}
        return FOLLOWS * relative(stage_norm(drift), stage_norm(self.update(number)))

    def is_hidden(self, number: int) -> bool:
        """Return whether a side whose parameters change at other steps may change them at this one unseen."""
        is_partial = number + 1 not in self.numbers or self._following(number) == number != 1
        return is_partial and any(changes and number not in changes for changes in (self.jax, self.torch))

    def residuals(self, number: int) -> tuple[dict[str, float], float]:
        """Compare the changes that follow a step's update.

        Returns:
            tensor -> norm of the difference over that of the parameters, {} where JAX shows no parameters; and the
            largest that counts as equal.
        """
        step = self.jax_run.steps[number]
        jax, torch = self.jax.get(number, {}), self.torch.get(number, {})
        if not step["params"] or not step["update"]:
            return {}, 0.0
        params, update = (self.alignment.of_torch(self.torch_run.steps[number][name]) for name in ("params", "update"))
        ends = _sums(self.params(number), self.update(number)), _sums(params, update)
        distances, drift = dict.fromkeys(params, 0.0), 0.0
        for name in jax.keys() | torch.keys():
            changes = [np.asarray(side.get(name, 0.0), float) for side in (jax, torch)]
            size = length(params[name]) + max(map(length, changes))
            distances[name] = relative(length(np.subtract(*changes)), size)
            if self.jax and self.torch:
                drift = max(drift, relative(length(ends[0][name] - ends[1][name]), size))
        return distances, ROUNDED * self._precision + FOLLOWS * drift


def _add(changes: Changes, number: int, added: Tensors) -> None:
    total = _sums(changes.get(number, {}), added)
    if total:
        changes[number] = total


def _sums(tensors: Tensors, added: Tensors) -> Tensors:
    sums = {name: tensors[name] + x if name in tensors else x for name, x in added.items()}
    return {**tensors, **sums}


def length(x: np.ndarray) -> float:
    """Return the Euclidean norm, NaN if an element is; `compare.residuals.norm` leaves such elements out."""
    return float(np.linalg.norm(np.asarray(x, float)))
