"""A few thousand elements of a run, on which a hypothesis is tried before it is put to the whole."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxddp.parity.diagnosis.optimizer.evidence import OptimizerEvidence, Tensors, ratio, replay
from jaxddp.parity.diagnosis.optimizer.recipes import Block, Recipe
from jaxddp.parity.records import stage_norm

ELEMENTS = 4000  # of a sample, over all tensors
AT_LEAST = 4  # of each tensor
BEYOND_SCALE = 1e12  # stands for a misfit that is larger, or no number


@dataclass(frozen=True)
class Sample:
    """Elements of all tensors over all steps.

    Attributes:
        tensor_of: the number of the tensor that each element belongs to, (E,).
        params, gradients, update: (S, E).
        scale: the norm of the whole stage at each step, (S,).
    """

    tensor_of: np.ndarray
    params: np.ndarray
    gradients: np.ndarray
    update: np.ndarray
    scale: np.ndarray

    def predict(self, recipe: Recipe) -> Iterator[np.ndarray]:
        """The updates of one step after the other, (E,)."""
        state, block = None, Block(self.tensor_of)
        for step, (params, gradients) in enumerate(zip(self.params, self.gradients, strict=True)):
            update, state = recipe.advance(block, step, state, params, gradients)
            yield update

    def misfit(self, recipe: Recipe) -> np.ndarray:
        """(predicted - found) / scale, (S, E)."""
        with np.errstate(all="ignore"):
            difference = (np.stack(list(self.predict(recipe))) - self.update) / self.scale[:, None]
        return np.nan_to_num(np.clip(difference, -BEYOND_SCALE, BEYOND_SCALE), nan=BEYOND_SCALE)

    def of_tensors(self, misfit: np.ndarray) -> np.ndarray:
        """The norm of each step's misfit in each tensor, (S, T)."""
        return np.sqrt([np.bincount(self.tensor_of, row**2) for row in misfit])

    def residual(self, recipe: Recipe) -> float:
        """The largest norm of any step and tensor."""
        return float(self.of_tensors(self.misfit(recipe)).max())

    def cut(self, steps: int, elements: int) -> "Sample":
        """The first steps, and elements from all over."""
        every = slice(None, None, -(-len(self.tensor_of) // elements))
        params, gradients, update = (array[:steps, every] for array in (self.params, self.gradients, self.update))
        return Sample(self.tensor_of[every], params, gradients, update, self.scale[:steps])


@dataclass(frozen=True)
class Survey:
    """How far the reference's own recipe is from what was found.

    Attributes:
        residuals: per step, tensor -> residual.
        scale: the norm of what was found at each step; where it is 0, the largest of all.
        chosen: tensor -> the elements that make a sample: some everywhere, and those furthest off.
    """

    residuals: list[dict[str, float]]
    scale: np.ndarray
    chosen: dict[str, np.ndarray]


def survey(evidence: OptimizerEvidence, recipe: Recipe) -> Survey:
    """Replay the reference's recipe on the whole run."""
    furthest = {name: np.zeros(shape).ravel() for name, shape in zip(recipe.names, recipe.shapes, strict=True)}
    residuals: list[dict[str, float]] = []
    norms: list[float] = []
    for step, predicted in replay(recipe, evidence):
        norm = stage_norm(step.update)
        norms.append(norm)
        residuals.append({})
        for name, update in predicted.items():
            difference = np.abs(update - step.update[name]).ravel()
            residuals[-1][name] = ratio(float(np.linalg.norm(difference)), norm)
            np.maximum(furthest[name], difference / (norm or 1.0), out=furthest[name])
    quota = max(AT_LEAST, ELEMENTS // len(furthest))
    scale = np.where(np.array(norms) > 0, norms, max(norms) or 1.0)
    return Survey(residuals, scale, {name: _choose(values, quota) for name, values in furthest.items()})


def _choose(distance: np.ndarray, quota: int) -> np.ndarray:
    if len(distance) <= quota:
        return np.arange(len(distance))
    half = quota // 2
    everywhere = np.linspace(0, len(distance) - 1, quota - half).astype(int)
    return np.union1d(everywhere, np.argpartition(distance, -half)[-half:])


def take_sample(evidence: OptimizerEvidence, chosen: dict[str, np.ndarray], scale: np.ndarray) -> Sample:
    """The chosen elements of every step."""

    def flat(tensors: Tensors) -> np.ndarray:
        return np.concatenate([tensors[name].ravel()[elements] for name, elements in chosen.items()])

    rows = []
    for index in range(len(evidence.steps)):
        step = evidence.steps[index]
        given = {name: step.gradient(name) for name in chosen}
        rows.append((flat(step.params), flat(given), flat(step.update)))
    tensor_of = np.repeat(np.arange(len(chosen)), [len(elements) for elements in chosen.values()])
    params, gradients, update = (np.stack(column) for column in zip(*rows, strict=True))
    return Sample(tensor_of, params, gradients, update, scale)
