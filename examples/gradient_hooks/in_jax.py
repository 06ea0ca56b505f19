"""Hooks in JAX, which become part of the compiled step."""

import contextlib
import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from examples.gradient_hooks.settings import CONFIG, LIMIT, POISONED, POISONED_REPLICA, batch
from jaxddp import models, optim
from jaxddp.data import datasets
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.data_parallel import DistributedDataParallel
from jaxddp.distributed.collectives import rank
from jaxddp.distributed.replicas import Replicas
from jaxddp.nn.functional import Functional
from jaxddp.nn.torch_weights import to_torch, torch_name
from jaxddp.plan.messages import all_reduces
from jaxddp.step.gradient_hooks import GradientHook
from jaxddp.step.options import options
from jaxddp.tracking.gradient_metrics import explained, renamed

# "local" or "mean" -> parameter -> gradient on each replica, (W, ...), with torch's names and layout.
Seen = dict[str, dict[str, Any]]


def trainer(replicas: Replicas, hooks: tuple[GradientHook, ...], logs: bool = False) -> DistributedDataParallel:
    """Build the model with hooks on its gradients."""
    config = CONFIG if logs else dataclasses.replace(CONFIG, log_gradients=())
    model = models.build(config, datasets.load(config))
    keywords = options(config, Functional(model))
    return DistributedDataParallel(
        model, optim.sgd(0.1), replicas=replicas, dtype="float64", gradient_hooks=hooks, **keywords
    )


def run(replicas: Replicas, *hooks: GradientHook) -> tuple[Seen, dict[str, float], str]:
    """Take a step; return the gradients that further hooks see after these, the metrics, and their report of NaNs."""
    seen: Seen = {"local": {}, "mean": {}}

    def keep(when: str, name: str, replica: jax.Array, gradient: jax.Array) -> None:
        for called, value in to_torch({name: gradient}).items():
            seen[when].setdefault(called, {})[int(replica)] = value

    def look(when: str, name: str, gradient: jax.Array) -> None:
        jax.debug.callback(partial(keep, when, name), rank(), gradient)

    looking = [GradientHook("*", partial(look, when), when) for when in seen]
    ddp = trainer(replicas, (*hooks, *looking), logs=not hooks)
    _, sums = ddp.step(ddp.init(), replicas.shard(batch()))
    jax.effects_barrier()
    stacked = {
        when: {name: np.stack([of_replica[r] for r in sorted(of_replica)]) for name, of_replica in of.items()}
        for when, of in seen.items()
    }
    metrics = {name: float(value) for name, value in sums.items()}
    return stacked, renamed(metrics, torch_name), explained(metrics, list(ddp.functional.params), torch_name)


def clip(when: str) -> GradientHook:
    """Limit every element to +-`LIMIT`, before or after the mean."""
    return GradientHook("*", lambda name, gradient: jnp.clip(gradient, -LIMIT, LIMIT), when)


def poison() -> GradientHook:
    """Set one parameter's gradient to NaN on one replica."""
    return GradientHook(
        POISONED, lambda name, gradient: jnp.where(rank() == POISONED_REPLICA, jnp.nan, gradient), "local"
    )


def all_reduces_of_a_step(replicas: Replicas) -> int:
    """Count the all-reduces in the compiled step."""
    ddp = trainer(replicas, ())
    batches = MicroBatches(None, {name: values[:, None] for name, values in batch().items()})
    return all_reduces(ddp.compiled_text(ddp.init(), replicas.shard(batches))).count


def hooked(replicas: Replicas) -> dict[str, Any]:
    """Run steps with hooks that see, clip and poison gradients; the counterpart of `in_torch.hooked`."""
    with _float64():
        seen, logged, _ = run(replicas)
        _, _, nan_report = run(replicas, poison())
        return {
            "seen": seen,
            "logged": logged,
            "clipped": {when: run(replicas, clip(when))[0]["mean"] for when in ("local", "mean")},
            "nan_report": nan_report,
            "all_reduces": all_reduces_of_a_step(replicas),
        }


@contextlib.contextmanager
def _float64() -> Iterator[None]:
    """Enable float64 in all threads; `jax.enable_x64` covers one thread only, and callbacks would receive float32."""
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
