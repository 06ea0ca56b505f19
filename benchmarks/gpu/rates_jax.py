"""Rates that jax reaches: matrix products, memory copies, all-reduces. Prints one line of JSON."""

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from benchmarks.gpu import part
from benchmarks.gpu.rates import DTYPES, Sizes, bus_rate, copy_rate, sizes, tflops
from benchmarks.gpu.timing import best_seconds
from jaxddp.distributed.collectives import all_reduce
from jaxddp.distributed.devices import prepare
from jaxddp.distributed.replicas import Replicas

PRECISIONS = {"bf16": "default", "tf32": "tensorfloat32", "float32": "highest"}


def rates(devices: list[jax.Device], size: Sizes) -> dict[str, Any]:
    """Measure all rates; the all-reduce is None on one device."""
    record: dict[str, Any] = {
        "device": devices[0].device_kind,
        "count": len(devices),
        "matmul_tflops": {dtype: _product(dtype, size) for dtype in DTYPES},
    }
    array = jnp.asarray(np.random.default_rng(0).normal(size=size.copied).astype(np.float32))
    seconds = best_seconds(_repeated(jax.jit(jnp.negative), array), size.calls)  # a copy alone could be left out
    record["copy_gb_per_second"] = copy_rate(size.copied, seconds)
    record["all_reduce_gb_per_second"] = _all_reduce(devices, size) if len(devices) > 1 else None
    return record


def _product(dtype: str, size: Sizes) -> float:
    rng = np.random.default_rng(0)
    kind = jnp.bfloat16 if dtype == "bf16" else jnp.float32
    a, b = (jnp.asarray(rng.normal(size=(size.matrix, size.matrix)).astype(np.float32), kind) for _ in range(2))
    with jax.default_matmul_precision(PRECISIONS[dtype]):
        return tflops(size.matrix, best_seconds(_repeated(jax.jit(jnp.matmul), a, b), size.calls))


def _all_reduce(devices: list[jax.Device], size: Sizes) -> float:
    replicas = Replicas(devices)
    numbers = replicas.shard(np.ones((len(devices), size.sent), np.float32))
    summed = replicas.map(lambda x: all_reduce(x), (0,), 0)
    return bus_rate(size.sent, len(devices), best_seconds(_repeated(summed, numbers), size.calls))


def _repeated(function: Callable[..., Any], *arrays: Any) -> Callable[[int], object]:
    """Return a function that makes so many calls, and waits for the last."""

    def work(calls: int) -> object:
        result = None
        for _ in range(calls):
            result = function(*arrays)
        return jax.block_until_ready(result)

    return work


if __name__ == "__main__":
    small = "--smoke" in sys.argv[1:]
    print(json.dumps(rates(prepare(2 if small else None, part.platform(small)), sizes(small))))
