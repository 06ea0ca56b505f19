"""The JAX side's loss and metrics of a program, as the step takes them."""

from functools import wraps
from typing import Any

import jax
from jax import numpy as jnp

from jaxddp.data.batches import from_arrays
from jaxddp.data.run_data import PADDING
from jaxddp.nn.losses import Batch, LossFunction, Metrics, as_losses, no_metrics, num_examples
from jaxddp.program import Program, takes
from jaxddp.program.losses import named_metrics


def losses_of(program: Program) -> LossFunction:
    """Return `jax_loss` as a function of a flat batch that returns `Losses`; with a state, (losses, state)."""
    loss = program.get("jax_loss", _no_loss)
    carries = takes(loss) == 3

    @wraps(loss)
    def of_flat(*arguments: Any, **named: Any) -> Any:
        returned = loss(*arguments[:-1], rebuilt(arguments[-1]), **named)
        return returned if carries else as_losses(returned, "jax_loss")

    return of_flat


def metrics_of(program: Program) -> Metrics:
    """Return the metrics of a test: `jax_metrics` or `metrics`, of what `predict` returns for a batch."""
    name = "jax_metrics" if program.get("jax_metrics") else "metrics"
    if (measure := program.get(name)) is None:
        return no_metrics
    (predict,) = program.need("predict", reason=", of whose results metrics are computed")

    def of_flat(*arguments: Any) -> dict[str, jax.Array]:
        batch = rebuilt(arguments[-1])
        returned = measure(predict(*arguments[:-1], batch), batch)
        return named_metrics(name, returned, num_examples(arguments[-1]), jnp.asarray)

    return of_flat


def _no_loss(model: Any, batch: Any) -> jax.Array:
    """Replace the loss of a program with a `jax_step`, whose tests have only metrics."""
    return jnp.full(num_examples(batch), jnp.nan)


def rebuilt(flat: Batch) -> Any:
    """Return the batch that a user's function sees: nested as the data are, without the loader's padding."""
    return from_arrays({name: array for name, array in flat.items() if name != PADDING})
