"""Speed of a job in torch DDP at the largest batch that fits.

The models are those of transformers with random weights, under autocast in bf16, with fused Adam.
"""

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu.jobs import LR, GpuJob, jobs, platform
from benchmarks.gpu.timing import largest_that_fits, median_seconds
from torch_ref.config import TorchConfig
from torch_ref.distributed import World
from torch_ref.launch import launch


def measure(job: str, smoke: bool, compiled: bool = False) -> dict[str, Any]:
    """Measure the largest batch size of a job that fits; the slowest rank counts."""
    chosen = jobs(smoke)[job]
    config = TorchConfig(platform=platform(smoke), devices=1 if smoke else None)
    # In a smoke run torch.compile compiles no kernels.
    backend = ("eager" if smoke else "inductor") if compiled else None

    def of_batch(size: int) -> dict[str, Any]:
        ranks = launch(partial(_of_rank, chosen, size, backend), config)
        return {"gpus": len(ranks), **max(ranks, key=lambda rank: rank["seconds_per_step"])}

    return largest_that_fits(chosen.batches, of_batch, torch.cuda.empty_cache)


def _of_rank(job: GpuJob, batch_size: int, backend: str | None, world: World, config: TorchConfig) -> dict[str, Any]:
    torch.backends.cudnn.benchmark = True  # choose the fastest convolutions, as XLA does
    training = Training(job, world, batch_size, backend)

    def agreed(steps: int) -> int:
        """Return rank 0's number of steps: all ranks must take as many."""
        return int(world.broadcast(torch.tensor([steps], device=world.device)).item())

    on_gpu = world.device.type == "cuda"
    return {
        "seconds_per_step": median_seconds(lambda steps: training.steps(agreed(steps)), job.seconds),
        "peak_bytes": torch.cuda.max_memory_allocated(world.device) if on_gpu else None,
        "loss": training.loss,
    }


def model_of(job: GpuJob) -> nn.Module:
    """Build the twin of a job's model with random weights."""
    transformers = importlib.import_module("transformers")  # takes seconds
    if job.kind == "decoder":
        names = {"layers": "n_layer", "width": "n_embd", "heads": "n_head", "length": "n_positions"}
        sizes = {names[name]: size for name, size in job.sizes.items() if name in names}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(
            vocab_size=job.sizes["vocabulary"], use_cache=False, attn_implementation="sdpa", **sizes, **dropout
        )
        return transformers.GPT2LMHeadModel(config)
    depths = list(job.sizes["blocks"])
    channels = [256 * 2**stage for stage in range(len(depths))]
    config = transformers.ResNetConfig(depths=depths, hidden_sizes=channels, num_labels=job.sizes["classes"])
    return transformers.ResNetForImageClassification(config).to(memory_format=torch.channels_last)


class Training:
    """A job on one rank, with a batch that is on its device already."""

    def __init__(self, job: GpuJob, world: World, batch_size: int, backend: str | None):
        self._device = world.device
        module = model_of(job).to(world.device).train()
        device_ids = [world.device.index] if world.device.type == "cuda" else None
        self._model: Any = DistributedDataParallel(module, device_ids, process_group=world.group)
        if backend is not None:
            self._model = torch.compile(self._model, backend=backend)
        self._optimizer = torch.optim.Adam(module.parameters(), lr=LR, fused=True)
        arrays = {name: torch.from_numpy(array).to(world.device) for name, array in job.arrays(batch_size).items()}
        self._y = arrays["y"].long().flatten()
        self._x = arrays["x"].long() if job.kind == "decoder" else arrays["x"].permute(0, 3, 1, 2)  # channels last
        self._loss = torch.zeros(())

    @property
    def loss(self) -> float:
        """Loss of the last step."""
        return self._loss.item()

    def steps(self, steps: int) -> None:
        """Take steps and wait for them."""
        for _ in range(steps):
            self._optimizer.zero_grad()
            with torch.autocast(self._device.type, torch.bfloat16):
                self._loss = self._cross_entropy(self._model(self._x).logits)
            self._loss.backward()
            self._optimizer.step()
        self._loss.item()

    def _cross_entropy(self, logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, -2), self._y)
