"""Gradients of some workloads in jax, in all precisions, and the weights at which they are taken, written to files."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from benchmarks import models_jax
from benchmarks.gpu.jobs import platform
from benchmarks.gpu.precision import EXACT, MODES, WEIGHTS, WORKLOADS, Gradients, file_of
from benchmarks.workloads import Workload, workloads
from jaxddp.distributed.devices import prepare
from jaxddp.nn.functional import Functional, cast
from jaxddp.nn.torch_weights import to_torch

PRECISIONS = {EXACT: "highest", "float32": "highest", "tf32": "tensorfloat32", "bf16": "highest"}


def measure(folder: str, smoke: bool) -> dict[str, str]:
    """Write the gradients and weights of all workloads, for `benchmarks.gpu.precision_torch`."""
    device = prepare(1, platform(smoke))[0]
    for name in WORKLOADS:
        workload = workloads(smoke)[name]
        start = Functional(models_jax.build(workload))
        written: dict[str, Any] = {WEIGHTS: to_torch({**start.params, **start.buffers})}
        written |= {mode: gradients(workload, mode, device) for mode in (EXACT, *MODES)}
        for kind, arrays in written.items():
            np.savez(file_of(Path(folder), name, kind), **arrays)
    return {"device": device.device_kind}


def gradients(workload: Workload, mode: str, device: jax.Device) -> Gradients:
    """Compute the gradients of the mean loss of the first batch, under torch's names."""
    dtype = EXACT if mode == EXACT else "float32"
    with jax.enable_x64(mode == EXACT), jax.default_matmul_precision(PRECISIONS[mode]), jax.default_device(device):
        functional = Functional(models_jax.build(workload))
        amp = "bf16" if mode == "bf16" else "none"
        local_loss = functional.local_loss(models_jax.loss_fn, train=True, amp=amp)
        params, buffers = cast(functional.params, dtype), cast(functional.buffers, dtype)
        arrays = {name: jnp.asarray(array[: workload.batch_size]) for name, array in workload.arrays().items()}

        def mean_loss(params: Any) -> jax.Array:
            sums, _ = local_loss(params, buffers, cast(arrays, dtype))
            return sums["loss"] / sums["count"]

        return to_torch(jax.device_get(jax.jit(jax.grad(mean_loss))(params)))
