"""Rates that torch reaches: matrix products, memory copies, all-reduces of nccl."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.jobs import platform
from benchmarks.gpu.rates import rates, sizes
from benchmarks.gpu.timing import Work
from torch_ref.config import TorchConfig
from torch_ref.distributed import World
from torch_ref.launch import launch


def measure(smoke: bool) -> dict[str, Any]:
    """Measure all rates on rank 0's device."""
    config = TorchConfig(platform=platform(smoke), devices=2 if smoke else None)
    return launch(partial(_of_rank, smoke), config)[0]


def _of_rank(smoke: bool, world: World, config: TorchConfig) -> dict[str, Any]:
    size, device = sizes(smoke), world.device
    torch.manual_seed(0)

    def product(dtype: str) -> Work:
        kind = torch.bfloat16 if dtype == "bf16" else torch.float32
        a, b = (torch.randn(size.matrix, size.matrix, device=device).to(kind) for _ in range(2))
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
        return _repeated(device, lambda: a @ b)

    source, sent = torch.randn(size.copied, device=device), torch.ones(size.sent, device=device)
    target = torch.empty_like(source)
    copy = _repeated(device, lambda: target.copy_(source))
    summed = _repeated(device, lambda: world.all_reduce(sent, "max"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "device": name,
        "cuda": str(torch.version.cuda),
        **rates(size, world.world_size, product, copy, summed),
    }


def _repeated(device: torch.device, function: Callable[[], Tensor]) -> Work:
    """Return a function that makes so many calls, and waits for the device."""

    def work(calls: int) -> None:
        for _ in range(calls):
            function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return work
