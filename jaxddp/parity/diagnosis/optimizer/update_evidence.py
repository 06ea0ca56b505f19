"""Gradients and updates of an optimizer, and the reference's recipe for them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxddp.parity.compare.rates import shares_of_float32
from jaxddp.parity.diagnosis.optimizer.recipes import ElementBlock, OptimizerRecipe, State
from jaxddp.parity.records import relative, stage_norm

Tensors = Mapping[str, np.ndarray]

FAMILIES = {"SGD": "sgd", "Adam": "adam", "AdamW": "adam", "RMSprop": "rmsprop", "Adagrad": "adagrad"}
PARTS = {"mu": "mean", "nu": "square", "sum_of_squares": "square", "trace": "buffer"}  # optax's state -> the recipe's
FLAGS = ("nesterov", "centered", "amsgrad", "maximize", "decoupled_weight_decay")


@dataclass(frozen=True)
class OptimizerStep:
    """One step, under torch's names, in float64.

    Attributes:
        groups: torch's param_groups at this step, with the tensors' names under "names".
        params: the reference's parameters before the step.
        gradients: input of JAX's optimizer.
        unused: parameters for which torch had no gradient; `gradients` holds zeros or nothing for them.
        update: output of JAX's optimizer, to be added to the parameters, divided by `shares`.
        state: part of `recipes.STATE` -> its tensors after the step, as far as JAX's optimizer shows them.
        clipped: factor of the gradients by which the reference has clipped them.
        norm: norm of all gradients, the large ones of which may be excerpts; None: of the given ones.
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
        kind: torch's class: SGD, Adam, AdamW, RMSprop, Adagrad; others cannot be explained.
        steps: in order; may be read from disk at each access.
        rates: the first group's learning rate at steps 1, 2, ..., as far as the scheduler goes.
        world_size: number of replicas.
        accumulation_steps: micro-batches per step.
        restored_at: number of steps after which the JAX side was saved and restored; None: never.
        highest: largest learning rate that the schedule is known to reach after the run.
        rounding: relative rounding error of each step's update; (): none.
        max_norm: largest norm of the reference's clipping; None: it does not clip, or clips before the first stage
            that is given.
        sizes: sizes of the batch, in words.
    """

    kind: str
    steps: Sequence[OptimizerStep]
    rates: Sequence[float]
    world_size: int
    accumulation_steps: int
    restored_at: int | None
    max_norm: float | None = None
    highest: float = 0.0
    rounding: Sequence[float] = ()
    sizes: Mapping[int, str] = field(default_factory=dict)


def reference_recipe(evidence: OptimizerEvidence) -> OptimizerRecipe | None:
    """Return the recipe of torch's optimizer, from its groups; parameters in no group do not change.

    Returns:
        The recipe; None for an optimizer that `recipes` does not have, or whose groups differ in their flags.
    """
    frames = [_Frame(step) for step in evidence.steps]
    flags = {frame_flags for frame in frames for frame_flags in frame.flags}
    if evidence.kind not in FAMILIES or len(flags) != 1:
        return None
    nesterov, centred, amsgrad, maximize, decoupled = flags.pop()

    def column(key: str, item: int | None = None) -> np.ndarray:
        return np.stack([frame.column(key, item) for frame in frames])

    family = FAMILIES[evidence.kind]
    momentum, used = column("momentum"), np.stack([frame.used for frame in frames])
    return OptimizerRecipe(
        family,
        frames[0].names,
        frames[0].shapes,
        rates=_continued(column("lr"), evidence.rates),
        index=np.arange(len(frames)),
        rate_decay=frames[0].column("lr_decay"),
        first=column("betas", 0) if family == "adam" else momentum,
        second=column("betas", 1) if family == "adam" else column("alpha"),
        # Without momentum, torch does not dampen the gradient.
        dampening=np.where(momentum == 0, 0.0, column("dampening")),
        eps=column("eps"),
        decay=column("weight_decay"),
        used=used,
        count=np.cumsum(used, axis=0),
        start=frames[0].column("initial_accumulator_value"),
        coupled=not (decoupled or evidence.kind == "AdamW"),
        nesterov=nesterov,
        centred=centred,
        amsgrad="torch" if amsgrad else "",
        norms=np.array([frame.norm for frame in frames]),
        clipped=np.array([frame.clipped for frame in frames]),
        max_norm=evidence.max_norm,
        scale=-1.0 if maximize else 1.0,
        restored_at=evidence.restored_at,
    )


class _Frame:
    """One step's groups as columns over the T tensors."""

    def __init__(self, step: OptimizerStep):
        self.names = tuple(step.update)
        self.shapes = tuple(step.update[name].shape for name in self.names)
        self.flags = {tuple(bool(group.get(flag)) for flag in FLAGS) for group in step.groups}
        group_of = {name: group for group in step.groups for name in group["names"]}
        self.used = np.array([name in group_of and name not in step.unused for name in self.names])
        self.clipped = step.clipped
        self.norm = (stage_norm(step.gradients) if step.norm is None else step.norm) / (step.clipped or 1.0)
        self._groups = [group_of.get(name, step.groups[0]) for name in self.names]

    def column(self, key: str, item: int | None = None) -> np.ndarray:
        """Return a setting of each tensor's group, (T,); 0 if the optimizer has no such setting."""
        values = [group.get(key, (0.0, 0.0) if item is not None else 0.0) for group in self._groups]
        return np.array([value if item is None else value[item] for value in values], dtype=np.float64)


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
    """Return the state that optax shows by the recipe's parts.

    >>> by_part({"mu:w": np.ones(2), "count": np.array(1)})
    {'mean': {'w': array([1., 1.])}}
    """
    parts: dict[str, dict[str, np.ndarray]] = {}
    for key, value in shown.items():
        kind, _, name = key.partition(":")
        if kind in PARTS:
            parts.setdefault(PARTS[kind], {})[name] = value
    return parts


class Replayed(NamedTuple):
    """A step, and what a recipe computes from its gradients.

    Attributes:
        step: the step.
        update: the recipe's update.
        states: tensor -> its optimizer state after the step.
    """

    step: OptimizerStep
    update: dict[str, np.ndarray]
    states: Mapping[str, State]


def replay(recipe: OptimizerRecipe, evidence: OptimizerEvidence) -> Iterator[Replayed]:
    """Yield each step with the update and the state that the recipe computes from the step's gradients."""
    return (replayed for (replayed,) in side_by_side([recipe], evidence))


def side_by_side(recipes: Sequence[OptimizerRecipe], evidence: OptimizerEvidence) -> Iterator[list[Replayed]]:
    """Yield, for each step, the result of `replay` for each recipe; each step is read once."""
    states: list[dict[str, State]] = [{} for _ in recipes]
    for index in range(len(evidence.steps)):
        step = evidence.steps[index]
        yield [_advanced(recipe, index, step, own) for recipe, own in zip(recipes, states, strict=True)]


def _advanced(recipe: OptimizerRecipe, index: int, step: OptimizerStep, states: dict[str, State]) -> Replayed:
    """Take the recipe's step from these states, which it replaces."""
    update = {}
    for number, name in enumerate(recipe.names):
        update[name], states[name] = recipe.advance(
            ElementBlock(number), index, states.get(name), step.params[name], step.gradient(name)
        )
    return Replayed(step, update, states)


def with_rates_of_float32(recipes: Sequence[OptimizerRecipe], evidence: OptimizerEvidence) -> Iterator[list[Replayed]]:
    """Replay as `side_by_side` does, with a learning rate rounded to float32 where the step's update shows one."""
    peaks = [evidence.highest] * len(recipes)
    for index, of_step in enumerate(side_by_side(recipes, evidence)):
        for number, (recipe, replayed) in enumerate(zip(recipes, of_step, strict=True)):
            rate_of = dict(zip(recipe.names, recipe.lr[index].tolist(), strict=True))
            peaks[number] = max(peaks[number], *rate_of.values())
            groups = [(group["names"], rate_of[group["names"][0]]) for group in replayed.step.groups if group["names"]]
            rounding = evidence.rounding[index] if evidence.rounding else 0.0
            before = {name: replayed.step.shares.get(name) or 1.0 for name in replayed.update}
            observed = {name: before[name] * update for name, update in replayed.step.update.items()}
            shares = shares_of_float32(observed, replayed.update, groups, peaks[number], rounding)
            update = {name: shares[name] / before[name] * update for name, update in replayed.update.items()}
            of_step[number] = replayed._replace(update=update)
        yield of_step


def contradiction(replayed: Replayed, recipe: OptimizerRecipe) -> float:
    """Return the largest residual between the state that the port shows and the one that the recipe predicts.

    A momentum buffer may be the predicted one times the step's rate, if the port applies the rate first.
    """
    worst = 0.0
    for part, observed in replayed.step.state.items():
        if part == "buffer" and recipe.family != "sgd":
            continue  # optax sums other terms
        predicted = {name: replayed.states[name][part] for name in observed if part in replayed.states.get(name, {})}
        shown = {name: observed[name] for name in predicted}
        units = _units(recipe) if part == "buffer" else (1.0,)
        apart = (residuals(shown, {name: unit * value for name, value in predicted.items()}) for unit in units)
        worst = max(worst, min((max(of_unit.values(), default=0.0) for of_unit in apart), default=0.0))
    return worst


def _units(recipe: OptimizerRecipe) -> tuple[float, ...]:
    """Return the factors that a momentum buffer may have: updates are summed with their sign, and with a fixed rate."""
    rates = np.unique(recipe.lr)
    return (1.0, -1.0, *((rates[0], -rates[0]) if len(rates) == 1 else ()))


def residuals(observed: Tensors, predicted: Tensors) -> dict[str, float]:
    """Return each tensor's ||predicted - observed|| over the norm of all observed tensors, see `relative`.

    >>> residuals({"w": np.array([3.0]), "b": np.array([4.0])}, {"w": np.array([3.0]), "b": np.array([4.5])})
    {'w': 0.0, 'b': 0.1}
    """
    scales = stage_norm(observed), stage_norm(predicted)
    return {name: relative(float(np.linalg.norm(predicted[name] - observed[name])), *scales) for name in observed}
