"""Gradients of a workload in jax, in all precisions, written to files: `python -m benchmarks.gpu.gradients_jax FOLDER`.

The weights that they are taken at are written too, for torch. Prints one line of JSON.
"""

import json
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from benchmarks import models_jax
from benchmarks.gpu import part
from benchmarks.gpu.gradients import EXACT, MODES, WORKLOADS, Gradients, file_of, save, workload_named
from benchmarks.workloads import Workload
from jaxddp.distributed.devices import prepare
from jaxddp.nn.functional import Functional, cast
from jaxddp.nn.torch_weights import to_torch

PRECISIONS = {EXACT: "highest", "float32": "highest", "tf32": "tensorfloat32", "bf16": "highest"}


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


def main(options: part.Options) -> None:
    """Write the gradients and weights of all workloads."""
    device = prepare(1, part.platform(options.smoke))[0]
    for name in WORKLOADS:
        workload = workload_named(name, options.smoke)
        start = Functional(models_jax.build(workload))
        save(file_of(options.folder, "jax", name, "weights"), to_torch({**start.params, **start.buffers}))
        for mode in (EXACT, *MODES):
            save(file_of(options.folder, "jax", name, mode), gradients(workload, mode, device))
    print(json.dumps({"device": device.device_kind, "numpy": np.__version__}))


if __name__ == "__main__":
    main(part.options_of("gradients_jax"))
