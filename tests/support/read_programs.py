"""A small network in torch and in jax; pieces of the loss in jax are arguments, so that any of them can be wrong."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from jax import lax
from jax import numpy as jnp
from torch import Tensor, nn
from torch.nn import functional as F

from jaxddp.parity.diagnosis.forward.loss_causes import ModelEvidence, ModelStep
from jaxddp.parity.diagnosis.forward.reading import Reading
from jaxddp.parity.graph import Graph, operations_of
from jaxddp.parity.jax_side.value_graph import TracedLoss
from jaxddp.parity.varied import WAYS, varied

FEATURES, WIDTH, CLASSES, EXAMPLES, STEPS = 6, 8, 5, 7, 2
Params = Mapping[str, jax.Array]


class TorchNet(nn.Module):
    """Leaky ReLU, a residual branch behind a LayerNorm, logits over a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = (
            nn.Linear(FEATURES, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(self.fc1(x), 0.01)
        h = h + F.gelu(self.fc2(self.norm(h)))
        return self.fc3(h) / 0.07


def torch_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"loss": F.cross_entropy(model(batch["x"]), batch["y"]), "count": torch.tensor(1.0)}


def linear(params: Params, name: str, x: jax.Array) -> jax.Array:
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"][None]


def norm(params: Params, x: jax.Array, eps: float, axes: tuple[int, ...] = (-1,)) -> jax.Array:
    mean = x.mean(axes, keepdims=True)
    variance = jnp.square(x - mean).mean(axes, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + eps) * params["norm.weight"][None] + params["norm.bias"][None]


@dataclass(frozen=True)
class Pieces:
    """Pieces of the loss in jax; the defaults are torch's.

    Attributes:
        slope, eps, temperature: numbers of leaky ReLU, LayerNorm and logits.
        activation: activation of the branch.
        joined: (input, branch) -> their sum.
        normalised_after: the norm is that of the sum, not of the branch's input.
        inner: what becomes of the norm's result.
        logits: what becomes of the logits.
    """

    slope: float = 0.01
    eps: float = 1e-5
    temperature: float = 0.07
    activation: Callable[[jax.Array], jax.Array] = lambda x: jax.nn.gelu(x, approximate=False)
    joined: Callable[[jax.Array, jax.Array], jax.Array] = lambda x, y: x + y
    normalised_after: bool = False
    inner: Callable[[jax.Array], jax.Array] = lambda x: x
    logits: Callable[[jax.Array], jax.Array] = lambda x: x

    def loss(self, params: Params, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Return the mean cross-entropy."""
        h = jax.nn.leaky_relu(linear(params, "fc1", batch["x"]), self.slope)
        inner = h if self.normalised_after else self.inner(norm(params, h, self.eps))
        h = self.joined(h, self.activation(linear(params, "fc2", inner)))
        h = norm(params, h, self.eps) if self.normalised_after else h
        logits = self.logits(linear(params, "fc3", h) / self.temperature)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1).mean()


def evidence_of(pieces: Pieces, reads: bool = True) -> ModelEvidence:
    """Return two steps of the loss in jax, with the program that was read from it."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    batches = [
        {"x": rng.normal(size=(EXAMPLES, FEATURES)), "y": rng.integers(0, CLASSES, EXAMPLES)} for _ in range(STEPS)
    ]
    return evidence_between(TorchNet().double(), torch_loss, pieces.loss, batches, reads)


def evidence_between(
    module: nn.Module, of_torch: Any, of_jax: Any, batches: Sequence[Mapping[str, np.ndarray]], reads: bool = True
) -> ModelEvidence:
    """Return the evidence of a step for each batch, with the program of the last one.

    Args:
        module: the reference's model.
        of_torch: (module, batch) -> "loss" and "count".
        of_jax: (parameters by torch's names, batch) -> loss.
        batches: arrays of each step.
        reads: read the program.
    """
    state = {name: parameter.detach().numpy().copy() for name, parameter in module.named_parameters()}
    steps: list[ModelStep] = []
    with jax.enable_x64(True):
        params = {name: jnp.asarray(x) for name, x in state.items()}
        for batch in batches:
            arrays = jax.tree.map(jnp.asarray, dict(batch))
            loss, gradients = jax.value_and_grad(of_jax)(params, arrays)
            tensors = {name: torch.from_numpy(x) for name, x in batch.items()}
            shown = np.array([float(loss)]), {name: np.asarray(x)[None] for name, x in gradients.items()}
            steps.append(ModelStep(state, None, [[tensors]], *shown, {}, {}))
        loss = TracedLoss(of_jax, (params, arrays))
        graph = loss.graph((params, arrays), backward=True) if reads else Graph(())
        others = {
            way: loss.graph(({name: jnp.asarray(x) for name, x in varied(state, state, way).items()}, arrays))
            for way in (WAYS if reads else ())
        }
    reading = Reading(operations_of(graph), len(steps) - 1, 0, graph=graph if reads else None, varied=others)
    return ModelEvidence(module, of_torch, steps, world_size=1, reading=reading)


stop = lax.stop_gradient
