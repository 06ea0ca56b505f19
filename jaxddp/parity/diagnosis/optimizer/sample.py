"""A sample of a run's elements, on which a hypothesis is tried before it is tried on the full run."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from jaxddp.parity.diagnosis.optimizer.program import OptimizerProgram
from jaxddp.parity.diagnosis.optimizer.update_evidence import OptimizerEvidence, Tensors, replay
from jaxddp.parity.records import relative, stage_norm

ELEMENTS = 4000  # elements of a sample, over all tensors
AT_LEAST = 4  # elements of each tensor
BEYOND_SCALE = 1e12  # replaces a larger misfit, and NaN


class ElementGroup(NamedTuple):
    """Elements that take their steps together.

    Attributes:
        tensor: number of a tensor that has the numbers of all of them.
        elements: their places in the sample.
        params, gradients: of each step.
    """

    tensor: int
    elements: np.ndarray
    params: list[Tensor]
    gradients: list[Tensor]


@dataclass(frozen=True)
class Sample:
    """Elements of all tensors over all steps.

    Attributes:
        tensor_of: number of each element's tensor, (E,).
        params, gradients, update: elements of each step, (S, E).
        scale: norm of the full update at each step, (S,).
    """

    tensor_of: np.ndarray
    params: np.ndarray
    gradients: np.ndarray
    update: np.ndarray
    scale: np.ndarray
    _known: dict[bytes, list[ElementGroup]] = field(default_factory=dict, compare=False)

    def at(self, tensor: int) -> np.ndarray:
        """Return the places of a tensor's elements."""
        return np.flatnonzero(self.tensor_of == tensor)

    def predict(self, program: OptimizerProgram) -> np.ndarray:
        """Return the updates of each step, (S, E)."""
        predicted = np.empty_like(self.update)
        for group in self._element_groups(program):
            state, updates = None, []
            for step, (params, gradients) in enumerate(zip(group.params, group.gradients, strict=True)):
                update, state = program.advance(group.tensor, step, state, params, gradients)
                updates.append(update.ravel())
            predicted[:, group.elements] = torch.stack(updates).numpy()
        return predicted

    def _element_groups(self, program: OptimizerProgram) -> list[ElementGroup]:
        """Return the elements by the numbers of their tensors, or by tensor where elements depend on each other."""
        classes = program.classes if program.step.elementwise else np.arange(len(program.names))
        if (key := classes.tobytes()) not in self._known:
            self._known[key] = [
                self._element_group(program, classes, tensor) for tensor in np.unique(classes[self.tensor_of])
            ]
        return self._known[key]

    def _element_group(self, program: OptimizerProgram, classes: np.ndarray, tensor: int) -> ElementGroup:
        elements = np.flatnonzero(classes[self.tensor_of] == tensor)
        shape = (-1,) if program.step.elementwise else program.shapes[tensor]
        both = ([torch.from_numpy(row[elements].reshape(shape)) for row in x] for x in (self.params, self.gradients))
        return ElementGroup(int(tensor), elements, *both)

    def misfit(self, program: OptimizerProgram) -> np.ndarray:
        """Return (predicted - observed) / scale, (S, E)."""
        try:
            with np.errstate(all="ignore"):
                difference = (self.predict(program) - self.update) / self.scale[:, None]
        except (ArithmeticError, AttributeError, TypeError, RuntimeError, ValueError):  # no such step is possible
            return np.full_like(self.update, BEYOND_SCALE)
        difference[~(np.abs(difference) < BEYOND_SCALE)] = BEYOND_SCALE
        return difference

    def of_tensors(self, misfit: np.ndarray) -> np.ndarray:
        """Return the norm of each step's misfit in each tensor, (S, T)."""
        return np.sqrt([np.bincount(self.tensor_of, row**2) for row in misfit])

    def residual(self, program: OptimizerProgram) -> float:
        """Return the largest norm of the misfit in any step and tensor."""
        return float(self.of_tensors(self.misfit(program)).max())

    def cut(self, steps: int, elements: int) -> "Sample":
        """Return the first steps, and elements at equal distances, all for `elements` 0."""
        if not elements:
            params, gradients, update = (array[:steps] for array in (self.params, self.gradients, self.update))
            return Sample(self.tensor_of, params, gradients, update, self.scale[:steps])
        every = slice(None, None, -(-len(self.tensor_of) // elements))
        params, gradients, update = (array[:steps, every] for array in (self.params, self.gradients, self.update))
        return Sample(self.tensor_of[every], params, gradients, update, self.scale[:steps])


@dataclass(frozen=True)
class Survey:
    """Distance of the observed updates from the reference's program.

    Attributes:
        residuals: per step, tensor -> residual.
        scale: norm of the observed update at each step; the largest norm of all steps where it is 0.
        chosen: tensor -> elements of the sample: some evenly spaced, and those furthest off.
    """

    residuals: list[dict[str, float]]
    scale: np.ndarray
    chosen: dict[str, np.ndarray]


def survey(evidence: OptimizerEvidence, program: OptimizerProgram) -> Survey:
    """Replay the reference's program on the full run."""
    furthest = {name: np.zeros(shape).ravel() for name, shape in zip(program.names, program.shapes, strict=True)}
    residuals: list[dict[str, float]] = []
    norms: list[float] = []
    for step, predicted, _ in replay(program, evidence):
        norm = stage_norm(step.update)
        norms.append(norm)
        residuals.append({})
        scale_of_step = norm or stage_norm(predicted)
        for name, update in predicted.items():
            difference = np.abs(update - step.update[name]).ravel()
            residuals[-1][name] = relative(float(np.linalg.norm(difference)), scale_of_step)
            np.maximum(furthest[name], difference / (norm or 1.0), out=furthest[name])
    quota = max(AT_LEAST, ELEMENTS // len(furthest))
    scale = np.where(np.array(norms) > 0, norms, max(norms) or 1.0)
    if not program.step.elementwise:
        quota = max(map(len, furthest.values()))
    return Survey(residuals, scale, {name: _choose(values, quota) for name, values in furthest.items()})


def _choose(distance: np.ndarray, quota: int) -> np.ndarray:
    if len(distance) <= quota:
        return np.arange(len(distance))
    half = quota // 2
    everywhere = np.linspace(0, len(distance) - 1, quota - half).astype(int)
    return np.union1d(everywhere, np.argpartition(distance, -half)[-half:])


def take_sample(evidence: OptimizerEvidence, chosen: dict[str, np.ndarray], scale: np.ndarray) -> Sample:
    """Return the chosen elements of every step."""

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
