"""Gradients of a workload in torch, in all precisions, written to files: `python -m benchmarks.gpu.gradients_torch`.

The weights are those that `benchmarks.gpu.gradients_jax` has written. Prints one line of JSON.
"""

import json
from collections.abc import Mapping

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks import models_torch
from benchmarks.gpu import part
from benchmarks.gpu.gradients import EXACT, MODES, WORKLOADS, Gradients, file_of, save, workload_named
from benchmarks.workloads import Workload


def gradients(workload: Workload, weights: Mapping[str, np.ndarray], mode: str, device: torch.device) -> Gradients:
    """Compute the gradients of the mean loss of the first batch."""
    dtype = torch.float64 if mode == EXACT else torch.float32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = mode == "tf32"
    module = models_torch.build(workload, weights).to(device, dtype).train()
    arrays = {name: array[: workload.batch_size] for name, array in workload.arrays().items()}
    tensors = models_torch.tensors(workload, arrays)
    x, y = tensors["x"].to(device, dtype), tensors["y"].to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=mode == "bf16"):
        loss = F.cross_entropy(module(x), y)
    loss.backward()
    named = module.named_parameters()
    return {name: p.grad.double().cpu().numpy() for name, p in named if p.grad is not None}


def main(options: part.Options) -> None:
    """Write the gradients of all workloads."""
    device = torch.device("cpu" if options.smoke else "cuda")
    for name in WORKLOADS:
        workload = workload_named(name, options.smoke)
        with np.load(file_of(options.folder, "jax", name, "weights"), allow_pickle=False) as arrays:
            weights = {key: arrays[key] for key in arrays.files}
        for mode in (EXACT, *MODES):
            save(file_of(options.folder, "torch", name, mode), gradients(workload, weights, mode, device))
    print(json.dumps({"device": "cpu" if options.smoke else torch.cuda.get_device_name()}))


if __name__ == "__main__":
    main(part.options_of("gradients_torch"))
