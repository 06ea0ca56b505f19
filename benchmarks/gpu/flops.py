"""Floating-point operations of the jobs' models, counted by `jaxddp.plan`."""

from typing import Any

import jax
from flax import nnx
from jax import numpy as jnp

from benchmarks.gpu.jobs import GpuJob, jobs
from benchmarks.gpu.train_jax import model_of
from jaxddp.distributed.devices import prepare
from jaxddp.plan.costs import Cost
from jaxddp.plan.hlo import parse
from jaxddp.plan.timeline import events

BACKWARD = 2  # times the forward pass: a product for the gradient of either operand


def measure(smoke: bool) -> dict[str, float]:
    """Count the operations per example and training step, by job."""
    with jax.default_device(prepare(1, "cpu")[0]):
        return {name: flops_per_example(job) for name, job in jobs(smoke).items()}


def flops_per_example(job: GpuJob) -> float:
    """Return the operations of the matrix products and convolutions of a step with one example.

    Those of the forward pass are read from the program that XLA compiles for the CPU, in which no kernel hides them;
    the attention of a decoder counts in full, masked or not.
    """
    graph, state = nnx.split(model_of(job))
    x = job.arrays(1)["x"]
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)

    def forward(state: nnx.State, x: jax.Array) -> jax.Array:
        model: Any = nnx.merge(graph, state)
        model.eval()  # one example has no statistics for BatchNorm
        return model(x)

    lowered = jax.jit(forward).lower(shapes, jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)))
    program = parse(str(lowered.compile().as_text()))
    cost = sum((event.cost for event in events(program)), Cost())
    return (1 + BACKWARD) * (cost.matrix + cost.convolution)
