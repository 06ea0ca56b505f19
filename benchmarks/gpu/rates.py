"""Rates that the GPUs reach in jax: matrix products, memory copies, all-reduces."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from benchmarks.gpu.jobs import platform
from benchmarks.gpu.timing import Work, best_seconds
from jaxddp.distributed.collectives import all_reduce
from jaxddp.distributed.devices import prepare
from jaxddp.distributed.replicas import Replicas

PRECISIONS = {"bf16": "default", "tf32": "tensorfloat32", "float32": "highest"}


@dataclass(frozen=True)
class Sizes:
    """Sizes of what is multiplied, copied and sent.

    Attributes:
        matrix: rows and columns of the matrices.
        copied, sent: float32 numbers in an array.
        calls: calls per repeat.
    """

    matrix: int = 8192
    copied: int = 2**28
    sent: int = 2**26
    calls: int = 10


def measure(smoke: bool) -> dict[str, Any]:
    """Measure all rates.

    A copy counts what is read and written; an all-reduce its bus bandwidth, which is what each GPU sends in a ring
    (PERFORMANCE.md of nccl-tests). One GPU sends nothing.
    """
    size = Sizes(matrix=64, copied=2**12, sent=2**10, calls=2) if smoke else Sizes()
    devices = prepare(2 if smoke else None, platform(smoke))
    count, replicas = len(devices), Replicas(devices)
    copied = jnp.ones(size.copied, jnp.float32)
    sent = replicas.shard(np.ones((count, size.sent), np.float32))

    def rate(amount: float, function: Callable[..., Any], *arrays: Any) -> float:
        return float(f"{amount / best_seconds(_repeated(function, *arrays), size.calls):.4g}")

    return {
        "device": devices[0].device_kind,
        "count": count,
        "matmul_tflops": {
            dtype: rate(2 * size.matrix**3 / 1e12, *_product(dtype, size.matrix)) for dtype in PRECISIONS
        },
        # A copy alone could be left out.
        "copy_gb_per_second": rate(2 * 4 * size.copied / 1e9, jax.jit(jnp.negative), copied),
        "all_reduce_gb_per_second": rate(
            4 * size.sent / 1e9 * 2 * (count - 1) / count, replicas.map(lambda x: all_reduce(x), (0,), 0), sent
        )
        if count > 1
        else None,
    }


def _product(dtype: str, size: int) -> tuple[Callable[..., Any], jax.Array, jax.Array]:
    """Return the function that multiplies two square matrices, and the matrices."""
    rng = np.random.default_rng(0)
    kind = jnp.bfloat16 if dtype == "bf16" else jnp.float32
    a, b = (jnp.asarray(rng.normal(size=(size, size)), kind) for _ in range(2))
    return jax.jit(partial(jnp.matmul, precision=PRECISIONS[dtype])), a, b


def _repeated(function: Callable[..., Any], *arrays: Any) -> Work:
    """Return a function that makes so many calls, and waits for the last."""

    def work(calls: int) -> object:
        result = None
        for _ in range(calls):
            result = function(*arrays)
        return jax.block_until_ready(result)

    return work
