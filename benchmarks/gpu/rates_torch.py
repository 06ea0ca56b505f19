"""Rates that torch reaches: matrix products, memory copies, all-reduces of nccl. Prints one line of JSON."""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import part
from benchmarks.gpu.rates import DTYPES, Sizes, bus_rate, copy_rate, sizes, tflops
from benchmarks.gpu.timing import best_seconds
from torch_ref.config import TorchConfig
from torch_ref.distributed import World
from torch_ref.launch import launch


def rates(smoke: bool, world: World, config: TorchConfig) -> dict[str, Any]:
    """Measure all rates on rank 0's device; the all-reduce is None on one device."""
    size, device = sizes(smoke), world.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    record: dict[str, Any] = {"device": name, "count": world.world_size, "cuda": str(torch.version.cuda)}
    record["matmul_tflops"] = {dtype: _product(dtype, size, device) for dtype in DTYPES}
    source = torch.randn(size.copied, device=device)
    target = torch.empty_like(source)
    seconds = best_seconds(_repeated(device, lambda: target.copy_(source)), size.calls)
    record["copy_gb_per_second"] = copy_rate(size.copied, seconds)
    record["all_reduce_gb_per_second"] = None
    if world.world_size > 1:
        numbers = torch.ones(size.sent, device=device)
        seconds = best_seconds(_repeated(device, lambda: world.all_reduce(numbers, "max")), size.calls)
        record["all_reduce_gb_per_second"] = bus_rate(size.sent, world.world_size, seconds)
    return record


def _product(dtype: str, size: Sizes, device: torch.device) -> float:
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    torch.manual_seed(0)
    a, b = (torch.randn(size.matrix, size.matrix, device=device).to(kind) for _ in range(2))
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    return tflops(size.matrix, best_seconds(_repeated(device, lambda: a @ b), size.calls))


def _repeated(device: torch.device, function: Callable[[], Tensor]) -> Callable[[int], object]:
    """Return a function that makes so many calls, and waits for the device."""

    def work(calls: int) -> None:
        for _ in range(calls):
            function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return work


if __name__ == "__main__":
    small = "--smoke" in sys.argv[1:]
    config = TorchConfig(platform=part.platform(small), devices=2 if small else None)
    print(json.dumps(launch(partial(rates, small), config)[0]))
