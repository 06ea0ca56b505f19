"""Options with which XLA compiles a training step for GPUs, so that messages overlap with the backward pass.

`jaxddp plan` shows a program with and without them. Without a GPU they were chosen by compiling for 8 GPUs;
docs/plan.md has what each changes.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax import lax

Tree = TypeVar("Tree")

BUCKETS = 4  # all-reduces into which the gradients are combined, if these are large enough
SMALLEST_BUCKET = 4 * 2**20  # bytes; the latency of a smaller all-reduce is longer than its transfer
_PREFIX = "xla_gpu_"


def compiler_options(gradient_bytes: int) -> dict[str, Any]:
    """Return XLA's options for a step on GPUs that averages this many bytes of gradients.

    Options that XLA_FLAGS sets are left out.

    >>> compiler_options(100_000_000)["xla_gpu_all_reduce_combine_threshold_bytes"]
    25000000
    """
    chosen = {
        # By default XLA combines up to 30 MiB: a small model's only all-reduce then has nothing to overlap with.
        "all_reduce_combine_threshold_bytes": max(gradient_bytes // BUCKETS, SMALLEST_BUCKET),
        # Implied for H100 only.
        "enable_latency_hiding_scheduler": True,
    }
    flags = os.environ.get("XLA_FLAGS", "")
    return {_PREFIX + name: value for name, value in chosen.items() if _PREFIX + name not in flags}


def options_for(devices: Sequence[jax.Device], gradients: Mapping[str, Any]) -> dict[str, Any]:
    """Return the compiler options for a step on these devices; none for CPU devices.

    Args:
        gradients: arrays, or shapes and dtypes, of the gradients that are averaged.
    """
    if devices[0].platform != "gpu":
        return {}
    return compiler_options(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(gradients)))


def kept_apart(params: Tree) -> Tree:
    """Return the parameters as separate values to XLA, on GPUs, for an update after an all-reduce.

    XLA fuses kernels that read the same array: the update of a convolution's weights with their transposition for the
    backward pass. The backward pass then waits for the all-reduce.
    """
    return lax.platform_dependent(params, cuda=lax.optimization_barrier, default=lambda tree: tree)
