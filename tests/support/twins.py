"""Runs of a jax twin beside its torch module, with faults planted in the twin.

Nothing here uses the diagnosis's replays.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax import numpy as jnp
from torch import Tensor, nn

from jaxddp.nn.functional import Functional
from jaxddp.parity.convert import Converter
from jaxddp.parity.diagnosis.forward.loss_causes import ModelEvidence, ModelStep
from tests.support.twin_models import Planted, Twins


def evidence(
    twins: Twins,
    *,
    world_size: int = 2,
    micro_batches: int = 1,
    steps: int = 1,
    loss_normalization: str = "ddp",
    combine: str = "",
    change: Callable[[dict[str, np.ndarray]], None] = lambda gradients: None,
    **faults: Any,
) -> ModelEvidence:
    """Return the jax twin's steps at random weights, with faults planted, beside the torch module.

    Args:
        twins: the model in both frameworks.
        world_size: number of replicas.
        micro_batches: number per step and replica.
        steps: number of steps.
        loss_normalization: the reference's, "ddp" or "global".
        combine: how the jax side combines micro-batches; the reference's way by default.
        change: function that changes the jax side's local gradients in place.
        faults: planted in the jax twin.
    """
    random = np.random.default_rng(0)
    torch.manual_seed(0)
    module = twins.torch_model().double().train()
    planted = Planted(**faults)
    functional = Functional(twins.jax_model(planted))
    converter = Converter(module, {n: v.shape for n, v in (functional.params | functional.buffers).items()})
    states = [perturbed(module, random) for _ in range(steps)]
    taken = []
    for number, state in enumerate(states):
        batches = [[twins.batch(random) for _ in range(micro_batches)] for _ in range(world_size)]
        if "no_labels_of" in faults:
            for batch in batches[faults["no_labels_of"]]:
                batch["y"][:] = -100
        if faults.get("without_padding_at") == number:
            for batch in (batch for ranks in batches for batch in ranks):
                batch["x"] = np.maximum(batch["x"], 1)
        at = states[max(number - 1, 0)] if "stale" in faults else state
        arrays = {name: jnp.asarray(value) for name, value in converter.to_jax(at).items()}
        sums, gradients, counts, buffers = differentiated(twins.jax_loss(planted), functional, arrays, batches)
        loss, gradients = combined(combine or loss_normalization, sums, gradients, counts)
        local = {name: np.stack(list(column)) for name, column in columns(converter, gradients, world_size).items()}
        change(local)
        kept = columns(converter, buffers, world_size)
        if "mean_buffers" in faults:
            kept = {name: [np.mean(column, 0)] * world_size for name, column in kept.items()}
        taken.append(
            ModelStep(
                state,
                states[number - 1] if number else None,
                [[to_torch(batch) for batch in ranks] for ranks in batches],
                loss,
                local,
                {name: column[0] for name, column in kept.items()},
                {name: np.stack(column) for name, column in kept.items()} if "own_buffers" in faults else {},
            )
        )
    return ModelEvidence(module, twins.torch_loss, taken, world_size, loss_normalization)


def perturbed(module: nn.Module, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Add noise to all parameters and buffers, tied tensors staying tied, and return the state dict."""
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.is_floating_point():
                noise = torch.from_numpy(random.normal(0.0, 0.3, tensor.shape))
                tensor.copy_(1 + noise.abs() if name.endswith("running_var") else tensor + noise)
    return {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}


def differentiated(loss_fn: Any, functional: Functional, arrays: dict[str, jax.Array], batches: Any) -> Any:
    """Return sums of losses, their gradients and counts, (replicas, micro-batches, ...), and the final buffers."""
    params = {name: arrays[name] for name in functional.params}
    batch = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), *[jax.tree.map(lambda *x: jnp.stack(x), *b) for b in batches]
    )

    def replica(batch: Any) -> Any:
        def loss(params: Any, buffers: Any, piece: Any) -> Any:
            model = functional.module(params, buffers)
            total, count = loss_fn(model, piece)
            left = Functional(model).buffers
            return total, (count, left)

        results, buffers = [], {name: arrays[name] for name in functional.buffers}
        for number in range(len(batches[0])):
            piece = jax.tree.map(lambda x, number=number: x[number], batch)
            (total, (count, buffers)), gradients = jax.value_and_grad(loss, has_aux=True)(params, buffers, piece)
            results.append((total, gradients, count))
        return *jax.tree.map(lambda *x: jnp.stack(x), *results), buffers

    sums, gradients, counts, buffers = jax.vmap(replica, axis_name="replica")(batch)
    return np.asarray(sums), gradients, np.asarray(counts, np.float64), buffers


@np.errstate(divide="ignore", invalid="ignore")  # a replica without labels has no loss
def combined(how: str, sums: np.ndarray, gradients: Any, counts: np.ndarray) -> tuple[np.ndarray, Any]:
    """Return local losses and gradients, computed apart from the diagnosis."""
    world_size, pieces = sums.shape
    weights = {
        "ddp": lambda: 1 / counts / pieces,
        "rank": lambda: np.ones_like(counts) / counts.sum(1)[:, None],
        "global": lambda: np.ones_like(counts) * world_size / counts.sum(),
        "not_divided": lambda: 1 / counts,
        "psum": lambda: 1 / counts / pieces,
        "scaled": lambda: 8 / counts / pieces,
    }[how]()
    loss = (weights * sums).sum(1)
    if how == "psum":
        loss, weights = np.full(world_size, loss.sum()), weights * world_size
    if how == "not_divided":
        loss = loss / pieces

    def add(leaf: Any) -> np.ndarray:
        return np.einsum("ra,ra...->r...", weights, np.asarray(leaf))

    return loss, jax.tree.map(add, gradients)


def columns(converter: Converter, arrays: Mapping[str, Any], world_size: int) -> dict[str, list[np.ndarray]]:
    """Return torch's tensors, one per replica."""
    rows = [
        converter.to_torch({name: np.asarray(value)[rank] for name, value in arrays.items()})
        for rank in range(world_size)
    ]
    return {name: [row[name] for row in rows] for name in rows[0]}


def to_torch(batch: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in batch.items()}
