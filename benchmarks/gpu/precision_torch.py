"""Gradients of some workloads in torch, in all precisions, and their errors beside jax's."""

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks import models_torch
from benchmarks.gpu.precision import EXACT, MODES, WEIGHTS, WORKLOADS, Gradients, errors, file_of, load, row
from benchmarks.workloads import Workload, workloads


def measure(folder: str, smoke: bool) -> dict[str, Any]:
    """Compare with the gradients that `benchmarks.gpu.precision_jax` has written, and remove these."""
    device = torch.device("cpu" if smoke else "cuda")
    table = {}
    for name in WORKLOADS:
        files = {kind: file_of(Path(folder), name, kind) for kind in (WEIGHTS, EXACT, *MODES)}
        jax = {kind: load(path) for kind, path in files.items()}
        weights = jax.pop(WEIGHTS)
        torchs = {mode: gradients(workloads(smoke)[name], weights, mode, device) for mode in jax}
        table[name] = errors(jax, torchs)
    for path in Path(folder).glob("gradients-*.npz"):
        path.unlink()
    return row(table)


def gradients(workload: Workload, weights: Gradients, mode: str, device: torch.device) -> Gradients:
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
