"""Gradients and updates of an optimizer, and the reference's program for them."""

import inspect
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jaxddp.parity.compare.clipping import NOT_CLIPPED, Clipping
from jaxddp.parity.compare.rates import shares_of_float32
from jaxddp.parity.deviation import Deviation
from jaxddp.parity.diagnosis.optimizer.program import OptimizerProgram
from jaxddp.parity.diagnosis.optimizer.trace import IMPLEMENTATION, State
from jaxddp.parity.records import relative, stage_norm

Tensors = Mapping[str, np.ndarray]

OTHER_INPUTS = ("LBFGS", "SparseAdam")  # which take a closure, and sparse gradients
# Parts of optax's state -> torch's keys for the same numbers.
PARTS = {
    "mu": ("exp_avg", "grad_avg"),
    "nu": ("exp_avg_sq", "square_avg"),
    "sum_of_squares": ("sum",),
    "trace": ("momentum_buffer",),
}


@dataclass(frozen=True)
class OptimizerStep:
    """One step, under torch's names, in float64.

    Attributes:
        groups: torch's param_groups at this step, with the tensors' names under "names".
        params: the reference's parameters before the step.
        gradients: input of JAX's optimizer.
        unused: parameters for which torch had no gradient; `gradients` holds zeros or nothing for them.
        update: output of JAX's optimizer, to be added to the parameters, divided by `shares`.
        state: part of `PARTS` -> its tensors after the step, as far as JAX's optimizer shows them.
        clipped: factor of the gradients by which the reference has clipped them.
        norm: norm of all gradients, where `gradients` holds excerpts of large ones; None: that of the given ones.
        shares: tensor -> share of the rate that JAX's optimizer rounds to float32, if the reference's update is right;
            1 for others.
    """

    groups: Sequence[Mapping[str, Any]]
    params: Tensors
    gradients: Tensors
    unused: frozenset[str]
    update: Tensors
    state: Mapping[str, Tensors] = field(default_factory=dict)
    clipped: float = 1.0
    norm: float | None = None
    shares: Mapping[str, float] = field(default_factory=dict)

    def gradient(self, name: str) -> np.ndarray:
        """Return a parameter's gradient, zeros if there is none."""
        gradient = self.gradients.get(name)
        return np.zeros_like(self.params[name]) if gradient is None else gradient


@dataclass(frozen=True)
class OptimizerEvidence:
    """Inputs and outputs of the optimizer over a run.

    Attributes:
        kind: torch's class, one of `torch.optim` that needs only gradients; others cannot be explained.
        steps: in order; may be read from disk at each access.
        rates: the first group's learning rate at steps 1, 2, ..., as far as the scheduler goes.
        world_size: number of replicas.
        accumulation_steps: micro-batches per step.
        restored_at: number of steps after which the JAX side was saved and restored; None: never.
        highest: largest learning rate that the schedule is known to reach after the run.
        rounding: relative rounding error of each step's update; (): none.
        clipping: how the reference clips; by norm, the steps' gradients have been clipped already. NOT_CLIPPED: it does
            not clip, or before the first stage that is given.
        sizes: sizes of the batch, in words.
        factors: mistakes that multiply the gradients that the port does not show, and their factors.
    """

    kind: str
    steps: Sequence[OptimizerStep]
    rates: Sequence[float]
    world_size: int
    accumulation_steps: int
    restored_at: int | None
    clipping: Clipping = NOT_CLIPPED
    highest: float = 0.0
    rounding: Sequence[float] = ()
    sizes: Mapping[int, str] = field(default_factory=dict)
    factors: Sequence[tuple[Deviation, float]] = ()


def reference_program(evidence: OptimizerEvidence) -> OptimizerProgram | None:
    """Return torch's optimizer of the run, from its groups; parameters in no group do not change.

    Returns:
        The program; None for an optimizer that torch does not have, or whose groups differ in their flags.
    """
    made = getattr(torch.optim, evidence.kind, None)
    if made is None or evidence.kind in OTHER_INPUTS:
        return None
    frames = [_Frame(step, inspect.signature(made).parameters) for step in evidence.steps]
    flags = {tuple(of_group.items()) for frame in frames for of_group in frame.flags}
    if len(flags) != 1:
        return None
    return OptimizerProgram(
        evidence.kind,
        frames[0].names,
        frames[0].shapes,
        {name: np.stack([frame.columns[name] for frame in frames]) for name in frames[0].columns if name != "lr"},
        dict(flags.pop()),
        rates=_continued(np.stack([frame.columns["lr"] for frame in frames]), evidence.rates),
        index=np.arange(len(frames)),
        used=np.stack([frame.used for frame in frames]),
        norms=np.array([frame.norm for frame in frames]),
        clipped=np.array([frame.clipped for frame in frames]),
        clipping=evidence.clipping,
        restored_at=evidence.restored_at,
    )


class _Frame:
    """One step's groups as columns over the T tensors."""

    def __init__(self, step: OptimizerStep, parameters: Container[str]):
        self.names = tuple(step.update)
        self.shapes = tuple(step.update[name].shape for name in self.names)
        group_of = {name: group for group in step.groups for name in group["names"]}
        self.used = np.array([name in group_of and name not in step.unused for name in self.names])
        self.clipped = step.clipped
        self.norm = (stage_norm(step.gradients) if step.norm is None else step.norm) / (step.clipped or 1.0)
        split = [numbers_and_flags({k: x for k, x in group.items() if k in parameters}) for group in step.groups]
        self.flags = [flags for _, flags in split]
        of_each = [split[step.groups.index(group_of.get(name, step.groups[0]))][0] for name in self.names]
        self.columns = {name: np.array([numbers[name] for numbers in of_each]) for name in of_each[0]}


def numbers_and_flags(group: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """Split the options of a group of parameters into numbers and others.

    >>> numbers_and_flags({"lr": 0.1, "betas": (0.9, 0.99), "amsgrad": False, "foreach": None})
    ({'lr': 0.1, 'betas[0]': 0.9, 'betas[1]': 0.99}, {'amsgrad': False})
    """
    numbers: dict[str, float] = {}
    flags: dict[str, Any] = {}
    for name, value in group.items():
        if name in IMPLEMENTATION:
            continue
        if isinstance(value, tuple | list) and all(map(_is_number, value)):
            numbers |= {f"{name}[{place}]": float(x) for place, x in enumerate(value)}
        elif _is_number(value):
            numbers[name] = float(value)
        else:
            flags[name] = tuple(value) if isinstance(value, list) else value
    return numbers, flags


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _continued(lr: np.ndarray, rates: Sequence[float]) -> np.ndarray:
    """Return the tensors' learning rates, (S, T), followed by those of the steps that were not taken.

    >>> _continued(np.array([[0.0, 0.0], [0.5, 1.0]]), [0.0, 0.5, 0.25])[2].tolist()
    [0.25, 0.5]
    """
    known = np.asarray(rates[: len(lr)])
    last = np.flatnonzero(known)
    ratio = lr[last[-1]] / known[last[-1]] if len(last) else np.ones(lr.shape[1])
    return np.concatenate([lr, np.asarray(rates[len(lr) :]).reshape(-1, 1) * ratio])


def by_part(shown: Tensors) -> dict[str, dict[str, np.ndarray]]:
    """Return the parts of the state that optax shows and torch has too.

    >>> by_part({"mu:w": np.ones(2), "count": np.array(1)})
    {'mu': {'w': array([1., 1.])}}
    """
    parts: dict[str, dict[str, np.ndarray]] = {}
    for key, value in shown.items():
        kind, _, name = key.partition(":")
        if kind in PARTS:
            parts.setdefault(kind, {})[name] = value
    return parts


class Replayed(NamedTuple):
    """A step, and what a program computes from its gradients.

    Attributes:
        step: the step.
        update: the program's update.
        states: tensor -> its optimizer state after the step, if the step shows the port's.
    """

    step: OptimizerStep
    update: dict[str, np.ndarray]
    states: Mapping[str, State]


def replay(program: OptimizerProgram, evidence: OptimizerEvidence) -> Iterator[Replayed]:
    """Yield each step with the update and the state that the program computes from the step's gradients."""
    return (replayed for (replayed,) in side_by_side([program], evidence))


def side_by_side(programs: Sequence[OptimizerProgram], evidence: OptimizerEvidence) -> Iterator[list[Replayed]]:
    """Yield, for each step, the result of `replay` for each program; each step is read once."""
    states: list[dict[int, State]] = [{} for _ in programs]
    for index in range(len(evidence.steps)):
        step = evidence.steps[index]
        yield [_advanced(program, index, step, own) for program, own in zip(programs, states, strict=True)]


def _advanced(program: OptimizerProgram, index: int, step: OptimizerStep, states: dict[int, State]) -> Replayed:
    """Take the program's step from these states of the first tensors of `program.together`, which it replaces."""
    update: dict[str, np.ndarray] = {}
    of_tensors: dict[str, State] = {}
    for group in program.together:
        names = [program.names[tensor] for tensor in group]
        shapes = [program.shapes[tensor] for tensor in group]
        given = _joined([step.params[name] for name in names]), _joined([step.gradient(name) for name in names])
        moved, state = program.advance(group[0], index, states.get(group[0]), *given)
        states[group[0]] = state
        update |= zip(names, (part.numpy() for part in _parts(moved, shapes)), strict=True)
        if step.state:
            are_joined = {key: np.shape(x) == moved.shape for key, x in state.items()}
            each = {key: _parts(x, shapes) if are_joined[key] else [x] * len(names) for key, x in state.items()}
            of_tensors |= {name: {key: of[k] for key, of in each.items()} for k, name in enumerate(names)}
    return Replayed(step, {name: update[name] for name in program.names}, of_tensors)


def _joined(tensors: Sequence[np.ndarray]) -> Tensor:
    """Return one tensor, or all elements of several."""
    only = tensors[0] if len(tensors) == 1 else np.concatenate([x.ravel() for x in tensors])
    return torch.from_numpy(np.asarray(only, np.float64))


def _parts(joined: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return the tensors of a joined one."""
    if len(shapes) == 1:
        return [joined]
    pieces = joined.split([math.prod(shape) for shape in shapes])
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def with_rates_of_float32(
    programs: Sequence[OptimizerProgram], evidence: OptimizerEvidence
) -> Iterator[list[Replayed]]:
    """Replay like `side_by_side`, with a learning rate rounded to float32 where the step's update shows one."""
    peaks = [evidence.highest] * len(programs)
    for index, of_step in enumerate(side_by_side(programs, evidence)):
        for number, (program, replayed) in enumerate(zip(programs, of_step, strict=True)):
            rate_of = dict(zip(program.names, program.lr[index].tolist(), strict=True))
            peaks[number] = max(peaks[number], *rate_of.values())
            groups = [(group["names"], rate_of[group["names"][0]]) for group in replayed.step.groups if group["names"]]
            rounding = evidence.rounding[index] if evidence.rounding else 0.0
            before = {name: replayed.step.shares.get(name) or 1.0 for name in replayed.update}
            observed = {name: before[name] * update for name, update in replayed.step.update.items()}
            shares = shares_of_float32(observed, replayed.update, groups, peaks[number], rounding)
            update = {name: shares[name] / before[name] * update for name, update in replayed.update.items()}
            of_step[number] = replayed._replace(update=update)
        yield of_step


def contradiction(replayed: Replayed, program: OptimizerProgram) -> float:
    """Return the largest residual between the state that the port shows and the one that the program predicts.

    A momentum buffer may be the predicted one times the step's rate, if the port applies the rate first.
    """
    worst = 0.0
    for part, observed in replayed.step.state.items():
        if part == "trace" and program.kind != "SGD":
            continue  # optax sums other terms
        states = {name: _of_part(replayed.states.get(name, {}), part) for name in observed}
        predicted = {name: state.numpy() for name, state in states.items() if state is not None}
        shown = {name: observed[name] for name in predicted}
        apart = [residuals(shown, predicted)]
        for unit in _units(program) if part == "trace" else ():
            apart.append(residuals(shown, {name: unit * value for name, value in predicted.items()}))
        worst = max(worst, min(max(of_unit.values(), default=0.0) for of_unit in apart))
    return worst


def _of_part(state: State, part: str) -> Any:
    """Return the tensor of a part of optax's state; None: there is none."""
    return next((state[key] for key in PARTS[part] if state.get(key) is not None), None)


def _units(program: OptimizerProgram) -> tuple[float, ...]:
    """Return the factors that a momentum buffer may have: updates are summed with their sign, and with a fixed rate."""
    rates = np.unique(program.lr)
    return (-1.0, *((rates[0], -rates[0]) if len(rates) == 1 else ()))


def residuals(observed: Tensors, predicted: Tensors) -> dict[str, float]:
    """Return each tensor's ||predicted - observed|| over the norm of all observed tensors, see `relative`.

    >>> residuals({"w": np.array([3.0]), "b": np.array([4.0])}, {"w": np.array([3.0]), "b": np.array([4.5])})
    {'w': 0.0, 'b': 0.1}
    """
    scale = stage_norm(observed) or stage_norm(predicted)
    return {name: relative(float(np.linalg.norm(predicted[name] - observed[name])), scale) for name in observed}
