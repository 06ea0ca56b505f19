"""A run of a stock torch optimizer as a program of its traced steps, with other numbers, branches or calls."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jaxddp.parity.compare.clipping import NOT_CLIPPED, Clipping
from jaxddp.parity.diagnosis.optimizer.stock_step import StockStep
from jaxddp.parity.diagnosis.optimizer.trace import State, Trace, TraceEdit

SMALL = 4096  # elements of a tensor that takes its steps together with others

_STEPS: dict[Any, StockStep] = {}


@dataclass(frozen=True)
class OptimizerProgram:
    """An optimizer over S steps and T tensors.

    The gradients of a step are scaled and clipped first; then torch's own step makes the update of each tensor, with
    the numbers of that step.

    Attributes:
        kind: name of the class in `torch.optim`.
        names: names of the T tensors.
        shapes: shapes of the T tensors.
        options: numbers of torch's parameter groups by name, as "betas[0]", without the rate, (S, T) each.
        flags: the other options, which all groups share.
        rates: learning rates, (R, T), R >= S: as far as the scheduler goes.
        index: row of `rates` at each step, (S,); rows beyond the last are the last.
        factor: factor of every learning rate, or of each tensor's, (T,).
        used: whether each tensor is updated, (S, T); the others and their state do not change.
        norms: |g| of all tensors together before scaling and clipping, (S,).
        clipped: the reference's clipping by norm, which the given gradients have had, as a factor, (S,).
        clipping: how gradients are clipped.
        scale: factor of the gradients before they are clipped.
        restored_at: number of steps after which the state is saved and restored; None: never.
        period: number of steps after which the state is lost, again and again; None: never.
        lost: keys of the state that the restore, or each period's end, loses.
        begin: number from which parts of the state start, by key.
        edits: changes of the traced calls.
        more: numbers that these need, by name.
    """

    kind: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    options: Mapping[str, np.ndarray]
    flags: Mapping[str, Any]
    rates: np.ndarray
    index: np.ndarray
    used: np.ndarray
    norms: np.ndarray
    clipped: np.ndarray
    clipping: Clipping = NOT_CLIPPED
    factor: float | np.ndarray = 1.0
    scale: float = 1.0
    restored_at: int | None = None
    period: int | None = None
    lost: frozenset[str] = frozenset()
    begin: Mapping[str, float] = field(default_factory=dict)
    edits: tuple[TraceEdit, ...] = ()
    more: Mapping[str, float] = field(default_factory=dict)

    @property
    def scheduled(self) -> bool:
        """Return whether the learning rate changes."""
        return bool((self.rates != self.rates[0]).any())

    @cached_property
    def lr(self) -> np.ndarray:
        """Learning rate of each step and tensor, (S, T)."""
        return self.factor * self.rates[np.clip(self.index, 0, len(self.rates) - 1)]

    @cached_property
    def shares(self) -> np.ndarray:
        """Factor of the given gradients at each step, from scaling and clipping, (S,)."""
        return self.scale / self.clipped * self.clipping.factor(np.abs(self.scale) * self.norms)

    @cached_property
    def classes(self) -> np.ndarray:
        """Number of the first tensor that has the same numbers as each tensor at every step, (T,)."""
        # A number that was broadcast over the tensors is the same for all.
        differing = [x for x in (self.lr, self.used, *self.options.values()) if x.strides[1] and (x != x[:, :1]).any()]
        if not differing:
            return np.zeros(len(self.names), int)
        _, first, number = np.unique(np.concatenate(differing), axis=1, return_index=True, return_inverse=True)
        return first[number.ravel()]

    @cached_property
    def together(self) -> list[list[int]]:
        """Numbers of the tensors that take their steps as one tensor, since a call costs more than small ones do."""
        groups: dict[int, list[int]] = {}
        for tensor, shape in enumerate(self.shapes):
            alone = not self.step.elementwise or math.prod(shape) > SMALL
            groups.setdefault(-1 - tensor if alone else int(self.classes[tensor]), []).append(tensor)
        return [*groups.values()]

    @cached_property
    def step(self) -> StockStep:
        """Traced steps; shared by all runs with the same flags."""
        numbers = self._numbers(0, 0)
        key = self.kind, tuple(numbers), tuple(self.flags.items())
        if key not in _STEPS:
            _STEPS[key] = StockStep(self.kind, numbers, self.flags)
        return _STEPS[key]

    @cached_property
    def _of_classes(self) -> dict[int, list[dict[str, float]]]:
        """Numbers of each step by name, for each class of tensors."""
        every = {"lr": self.lr, **self.options}
        numbers = {}
        for tensor in {*self.classes.tolist()}:
            rows = zip(*(column[:, tensor].tolist() for column in every.values()), strict=True)
            numbers[tensor] = [dict(zip(every, row, strict=True)) for row in rows]
        return numbers

    def _numbers(self, step: int, tensor: int) -> dict[str, float]:
        return self._of_classes[int(self.classes[tensor])][step]

    def advance(
        self, tensor: int, step: int, state: State | None, params: Tensor, gradients: Tensor
    ) -> tuple[Tensor, State]:
        """Take one step on a tensor, or on elements of tensors of its class.

        Args:
            tensor: number of the tensor.
            step: counted from 0.
            state: after the step before; None before the first.
            params, gradients: of any shape.

        Returns:
            The update, to be added to the parameters, and the new state.
        """
        if state is None:
            state = {key: torch.full_like(params, value) for key, value in self.begin.items()}
        ends = self.period is not None and step > 0 and step % self.period == 0
        if self.lost and (ends or (self.period is None and step == self.restored_at)):
            state = self._restored(state, params)
        if not self.used[step, tensor]:
            return torch.zeros_like(params), state
        if (share := float(self.shares[step])) != 1.0:
            gradients = share * gradients
        gradients = self.clipping.by_value(gradients)
        return self.step.step(params, gradients, state, self._numbers(step, tensor), self.edits, self.more)

    def _restored(self, state: State, params: Tensor) -> State:
        """Return the state without the lost parts: those are as before the first step."""
        if self.lost >= state.keys():
            return {}
        fresh = self.step.initial(params, self._numbers(0, 0))
        return {key: fresh.get(key) if key in self.lost else value for key, value in state.items()}

    @property
    def trace(self) -> Trace:
        """Calls of the first step."""
        return self.step.first(self._numbers(0, 0))

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Return the keys of a tensor's state after a step."""
        one = torch.full((2, 2), 0.5, dtype=torch.float64)
        return tuple(key for key, x in self.step.step(one, one, {}, self._numbers(0, 0))[1].items() if x is not None)

    @property
    def moments(self) -> tuple[str, ...]:
        """Return the keys of the state without the count of steps."""
        return tuple(key for key in self.state_keys if key != "step")

    def with_clipping(self, **fields: Any) -> "OptimizerProgram":
        """Return the program with other fields of its clipping."""
        return replace(self, clipping=replace(self.clipping, **fields))

    def with_options(self, **values: Any) -> "OptimizerProgram":
        """Return the program with other numbers, by name, each a number or broadcast to (S, T)."""
        new = {name: np.broadcast_to(np.asarray(value, float), self.used.shape) for name, value in values.items()}
        return replace(self, options={**self.options, **new})

    def with_flags(self, **flags: Any) -> "OptimizerProgram":
        """Return the program with other flags."""
        return replace(self, flags={**self.flags, **flags})

    def with_edit(self, edit: TraceEdit, **numbers: float) -> "OptimizerProgram":
        """Return the program with a change of its calls, and numbers that the change needs."""
        return replace(self, edits=(*self.edits, edit), more={**self.more, **numbers})
