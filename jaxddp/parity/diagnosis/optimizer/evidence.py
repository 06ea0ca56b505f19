"""Gradients and updates of an optimizer, and the reference's recipe for them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxddp.parity.compare.rates import shares_of_float32
from jaxddp.parity.compare.residuals import relative
from jaxddp.parity.diagnosis.optimizer.recipes import Block, OptimizerRecipe, State
from jaxddp.parity.records import stage_norm

Tensors = Mapping[str, np.ndarray]

FAMILIES = {"SGD": "sgd", "Adam": "adam", "AdamW": "adam", "RMSprop": "rmsprop", "Adagrad": "adagrad"}
FLAGS = ("nesterov", "centered", "amsgrad", "maximize", "decoupled_weight_decay")


@dataclass(frozen=True)
class OptimizerStep:
    """One step, under torch's names, in float64.

    Attributes:
        groups: torch's param_groups at this step, with the tensors' names under "names".
        params: the reference's parameters before the step.
        gradients: input of JAX's optimizer.
        unused: parameters for which torch had no gradient; `gradients` holds zeros or nothing for them.
        update: output of JAX's optimizer, to be added to the parameters.
    """

    groups: Sequence[Mapping[str, Any]]
    params: Tensors
    gradients: Tensors
    unused: frozenset[str]
    update: Tensors

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
    """

    kind: str
    steps: Sequence[OptimizerStep]
    rates: Sequence[float]
    world_size: int
    accumulation_steps: int
    restored_at: int | None


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


def replay(
    recipe: OptimizerRecipe, evidence: OptimizerEvidence
) -> Iterator[tuple[OptimizerStep, dict[str, np.ndarray]]]:
    """Yield each step, and the update that the recipe computes from the step's gradients."""
    states: dict[str, State | None] = dict.fromkeys(recipe.names)
    for index in range(len(evidence.steps)):
        step = evidence.steps[index]
        update = {}
        for number, name in enumerate(recipe.names):
            update[name], states[name] = recipe.advance(
                Block(number), index, states[name], step.params[name], step.gradient(name)
            )
        yield step, update


def with_rates_of_float32(
    recipe: OptimizerRecipe, evidence: OptimizerEvidence
) -> Iterator[tuple[OptimizerStep, dict[str, np.ndarray]]]:
    """Replay as `replay` does, with a learning rate rounded to float32 where the step's update shows one."""
    peak = 0.0
    for rates, (step, predicted) in zip(recipe.lr, replay(recipe, evidence), strict=True):
        rate_of = dict(zip(recipe.names, rates.tolist(), strict=True))
        peak = max(peak, *rate_of.values())
        groups = [(group["names"], rate_of[group["names"][0]]) for group in step.groups if group["names"]]
        shares = shares_of_float32(step.update, predicted, groups, peak)
        yield step, {name: shares[name] * update for name, update in predicted.items()}


def residuals(observed: Tensors, predicted: Tensors) -> dict[str, float]:
    """Return each tensor's ||predicted - observed|| over the norm of all observed tensors; infinite for NaN.

    >>> residuals({"w": np.array([3.0]), "b": np.array([4.0])}, {"w": np.array([3.0]), "b": np.array([4.5])})
    {'w': 0.0, 'b': 0.1}
    """
    scale = stage_norm(observed)
    return {name: relative(float(np.linalg.norm(predicted[name] - observed[name])), scale) for name in observed}
