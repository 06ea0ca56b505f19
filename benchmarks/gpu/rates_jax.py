"""Rates that jax reaches: matrix products, memory copies, all-reduces."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from benchmarks.gpu.jobs import platform
from benchmarks.gpu.rates import rates, sizes
from benchmarks.gpu.timing import Work
from jaxddp.distributed.collectives import all_reduce
from jaxddp.distributed.devices import prepare
from jaxddp.distributed.replicas import Replicas

PRECISIONS = {"bf16": "default", "tf32": "tensorfloat32", "float32": "highest"}


def measure(smoke: bool) -> dict[str, Any]:
    """Measure all rates."""
    devices, size = prepare(2 if smoke else None, platform(smoke)), sizes(smoke)
    rng, replicas = np.random.default_rng(0), Replicas(devices)

    def product(dtype: str) -> Work:
        kind = jnp.bfloat16 if dtype == "bf16" else jnp.float32
        a, b = (jnp.asarray(rng.normal(size=(size.matrix, size.matrix)), kind) for _ in range(2))
        return _repeated(jax.jit(partial(jnp.matmul, precision=PRECISIONS[dtype])), a, b)

    copied = jnp.asarray(rng.normal(size=size.copied).astype(np.float32))
    copy = _repeated(jax.jit(jnp.negative), copied)  # a copy alone could be left out
    sent = replicas.shard(np.ones((len(devices), size.sent), np.float32))
    summed = _repeated(replicas.map(lambda x: all_reduce(x), (0,), 0), sent)
    return {"device": devices[0].device_kind, **rates(size, len(devices), product, copy, summed)}


def _repeated(function: Callable[..., Any], *arrays: Any) -> Work:
    """Return a function that makes so many calls, and waits for the last."""

    def work(calls: int) -> object:
        result = None
        for _ in range(calls):
            result = function(*arrays)
        return jax.block_until_ready(result)

    return work
