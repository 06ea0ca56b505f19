"""Evaluate a port's torch model like torch_ref's trainer. Imports no jax."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from jaxddp.data.batches import from_arrays
from jaxddp.parity.case_interface import Trajectory
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.port import Port, PortSource
from jaxddp.parity.port.evaluation import (
    Evaluated,
    EvaluationBatch,
    NotComparableError,
    evaluation_batches,
    noted,
    output_arrays,
    real,
)
from jaxddp.parity.processes import Tell
from jaxddp.parity.records import Records
from jaxddp.parity.torch_side.draws import ConstantDraws, NotedDraws, ServedDraws
from jaxddp.parity.torch_side.side import load_state, side_of_port, to_batch
from jaxddp.parity.torch_side.widened import InFloat64
from jaxddp.program import Program, bound
from torch_ref.distributed import World
from torch_ref.losses import Batch, Sums
from torch_ref.program import evaluation_of, sums

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# Mode of the model -> the layers that keep the mode in which the run trains them.
MODES: dict[str, tuple[type, ...]] = {
    **{"evaluation": (), "training": (nn.Module,), "dropout": DROPOUT, "statistics": (_BatchNorm,)},
}
PERTURBATION = 2.0**-23  # of each parameter, relative: float32's rounding


@dataclass(frozen=True)
class EvaluateTorch:
    """A job that evaluates the model with the weights after the run.

    Attributes:
        source: makes the port.
        start: torch's initial weights.
        reference: folders of torch's run.
        steps: steps of the run.
        modes: of `MODES`.
        seed: seed of a small change of the weights; None: they are as they are.
        world_size: always 1.
    """

    source: PortSource
    start: Arrays
    reference: list[Path]
    steps: int
    modes: tuple[str, ...] = ("evaluation",)
    seed: int | None = None
    world_size: int = 1
    dtype: str = "float64"

    def run(self, world: World, tell: Tell) -> dict[str, list[Evaluated]]:
        """Evaluate every batch in each mode."""
        tell("test_data")
        port = self.source.port()
        model = side_of_port(port, self.steps, self.dtype).model.to(world.device)
        batches, after = evaluation_batches(port, "torch", self.steps), Trajectory(self.start, Records(self.reference))
        trained, evaluated = {layer: layer.training for layer in model.modules()}, {}
        for mode in self.modes:
            load_state(model, self.start)
            load_state(model, after.last(), strict=False)
            if self.seed is not None:
                _perturb(model, self.seed)
            model.eval()
            for layer in trained:
                layer.training = trained[layer] if isinstance(layer, MODES[mode]) else layer.training
            tell(f"predict, in {mode}")
            evaluated[mode] = [self._of_batch(port, model, batch, world) for batch in batches]
        return evaluated

    def _of_batch(self, port: Port, model: nn.Module, batch: EvaluationBatch, world: World) -> Evaluated:
        flat = {name: x.to(world.device) for name, x in to_batch(batch.arrays, self.dtype).items()}
        evaluated = Evaluated(batch.test_set, batch.size, batch.digest)
        kept: list[Any] = []

        def predict(*arguments: Any) -> Any:
            assert port.predict is not None, "the program has it only if the port does"
            kept.append(port.predict(*arguments))
            return kept[-1]

        with noted(evaluated.errors, "metrics", self.source.name), self._alike(model):
            of_batch = _sums_of(port, predict, batch)(model, flat)
            evaluated.sums.update({name: float(x) for name, x in of_batch.items()})
        if evaluated.errors:
            kept.clear()  # the random numbers that cannot be the same may be those of predict
        if port.predict is not None:
            with noted(evaluated.errors, "predict", self.source.name), self._alike(model):
                outputs = kept[0] if kept else predict(model, from_arrays(flat))
                evaluated.outputs.update({name: _array(x) for name, x in output_arrays(outputs).items()})
        return evaluated

    @contextmanager
    def _alike(self, model: nn.Module) -> Iterator[None]:
        """Compute in float64, with constants for random numbers; raise `NotComparableError` where others are drawn."""
        draws, served = NotedDraws(model), ServedDraws(ConstantDraws())
        with torch.no_grad(), draws, served, InFloat64():
            yield
        if refused := next((draw for draw in draws.draws if draw.refused), None):
            raise NotComparableError(f"draws {refused}, which cannot be the same on both sides")


def _sums_of(port: Port, predict: Any, batch: EvaluationBatch) -> Any:
    """Return (model, flat batch) -> the sums of losses and metrics, as those of the trainer's test."""
    functions = {"predict": port.predict and predict, "metrics": port.metrics, "torch_metrics": port.torch_metrics}

    def loss_fn(model: nn.Module, flat: Batch) -> Sums:
        if not batch.has_losses:
            return {}
        return sums(bound(port.torch_loss, train=model.training)(model, flat), flat, train=False)

    return evaluation_of(Program("", functions), loss_fn)


def _perturb(model: nn.Module, seed: int) -> None:
    """Multiply each element of the parameters by 1 plus or minus `PERTURBATION`."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.from_numpy(rng.integers(0, 2, tuple(parameter.shape)) * 2 - 1)
            parameter.mul_(1 + PERTURBATION * signs.to(parameter))


def _array(x: Any) -> np.ndarray:
    tensor: Tensor = torch.as_tensor(x).detach().cpu()
    return real((tensor.double() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy())
