"""Faults outside the catalogue, which a diagnosis must locate; some are edits of a single call, and are named."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from jax import numpy as jnp

from jaxddp.distributed.collectives import AXIS_NAME

from . import policy
from .models_flax import gelu, mlp_loss
from .planted_edits import Edit, Planted, model, on, optimizer, step
from .scenarios import Scenario
from .steps import Tree, named_map, pmean


def gradient_times(name: str, factor: float) -> Edit:
    """Multiply one tensor's gradient before the mean over the replicas."""

    def differentiate(loss: Any, params: Tree, state: Any, buffers: Tree, batch: Mapping[str, Any]) -> Any:
        outputs, gradients = jax.value_and_grad(loss, has_aux=True)(params, buffers, batch)
        return outputs, named_map(lambda one, g: factor * g if one == name else g, gradients)

    return step(differentiate=differentiate)


def with_squared_logits(jax_model: Any, batch: Mapping[str, Any]) -> jax.Array:
    """Add a penalty on the logits to the loss."""
    logits = jax_model(batch["x"], batch["mask"])
    return mlp_loss(jax_model, batch) + 0.01 * jnp.square(logits).mean()


def favouring_rank0(gradients: Tree) -> Tree:
    """Compute a mean in which replica 0 has a larger weight."""
    weight = jnp.where(lax.axis_index(AXIS_NAME) == 0, 1.1, 1.0)
    return pmean(jax.tree.map(lambda g: weight * g, gradients))


def filled_up_with_the_last(scenario: Scenario, at: int) -> np.ndarray:
    """Pad an epoch with its last example instead of its first."""
    right = scenario.order(at).copy()
    if at % scenario.steps_per_epoch == scenario.steps_per_epoch - 1:
        right[-1, -1] = right[-2, -1]
    return right


UNCATALOGUED: dict[str, Planted] = {
    "tanh_for_gelu": Planted(
        model(activations=(gelu, jnp.tanh)), on("mlp"), "local_loss", layer="fc3", named=("other_function",)
    ),
    "half_residual": Planted(
        model(residual=lambda x, y: x + 0.5 * y), on("convnet"), "local_loss", layer="conv3", named=("factor",)
    ),
    "swapped_layers": Planted(
        model(normalise=lambda norm, activation, x: norm(activation(x))),
        on("convnet"),
        "local_loss",
        layer="bn1",
        named=("call_moved",),
    ),
    "temperature": Planted(model(temperature=1.001), on("mlp"), "local_loss", named=("factor",)),
    "squared_logits": Planted(
        lambda right: replace(right, loss=with_squared_logits), on("mlp"), "local_loss", named=("other_expression",)
    ),
    "stopped_branch": Planted(
        model(branch=lax.stop_gradient), on("tokens"), "local_gradients", tensor="down.", named=("gradient_stopped",)
    ),
    "gradient_times_1.1": Planted(gradient_times("fc2.kernel", 1.1), on("mlp"), "local_gradients", tensor="fc2.weight"),
    "bias_sign": Planted(gradient_times("fc1.bias", -1.0), on("mlp"), "local_gradients", tensor="fc1.bias"),
    "favouring_rank0": Planted(step(reduce=favouring_rank0), on("mlp") + on("tokens"), "gradients"),
    "lion": Planted(optimizer(direction=lambda recipe: optax.scale_by_lion()), on("mlp"), "update"),
    "centralised_gradients": Planted(optimizer(first=(optax.centralize(),)), on("mlp"), "update"),
    "filled_up_with_the_last": Planted(
        lambda right: replace(right, order=filled_up_with_the_last), on("mlp") + on("convnet"), "samples", step=5
    ),
    "other_width": Planted(
        lambda right: replace(right, loss=partial(policy.jax_loss, widths=(0.1, 0.1))),
        on("policy"),
        "local_loss",
        named=("number",),
    ),
    "mean_of_terms": Planted(
        lambda right: replace(
            right, loss=partial(policy.jax_loss, of_values=lambda unclipped, clipped: (unclipped + clipped) / 2)
        ),
        on("policy"),
        "local_loss",
        named=("other_expression",),
    ),
    "divided_by_n_minus_2": Planted(
        lambda right: replace(right, loss=partial(policy.jax_loss, ddof=2)),
        on("policy"),
        "local_loss",
        named=("other_expression",),
    ),
}
