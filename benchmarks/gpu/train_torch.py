"""Speed of a job in torch DDP at the largest batch that fits: `python -m benchmarks.gpu.train_torch JOB [--compiled]`.

The models are transformers' own, with random weights, under autocast in bf16, with fused Adam. Prints one line of JSON.
"""

import importlib
import json
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tyro.conf import Positional

from benchmarks.gpu import part
from benchmarks.gpu.fitting import Measured, largest_that_fits
from benchmarks.gpu.jobs import LR, Job, jobs
from benchmarks.gpu.timing import median_seconds
from jaxddp import cli
from torch_ref.config import TorchConfig
from torch_ref.distributed import World
from torch_ref.launch import launch


@dataclass(frozen=True)
class Options:
    """Measure the speed of a job in torch DDP."""

    job: Positional[str]
    """decoder | convnet."""
    compiled: bool = False
    """Use torch.compile."""
    smoke: bool = False
    """CPU devices and tiny sizes; torch.compile then compiles no kernels."""
    seconds: float = 1.0
    """Seconds of a round."""


def model_of(job: Job) -> nn.Module:
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

    def __init__(self, job: Job, world: World, batch_size: int, compiled: bool, backend: str):
        self._device = world.device
        module = model_of(job).to(world.device).train()
        device_ids = [world.device.index] if world.device.type == "cuda" else None
        self._model: Any = DistributedDataParallel(module, device_ids, process_group=world.group)
        if compiled:
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


def measure(options: Options, batch_size: int, world: World, config: TorchConfig) -> Measured:
    """Measure a batch size on one rank."""
    torch.backends.cudnn.benchmark = True  # choose the fastest convolutions, as XLA does
    job = jobs(options.smoke)[options.job]
    training = Training(job, world, batch_size, options.compiled, "eager" if options.smoke else "inductor")
    seconds = median_seconds(lambda steps: training.steps(_agreed(steps, world)), options.seconds)
    on_gpu = world.device.type == "cuda"
    return {
        "seconds_per_step": seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(world.device) if on_gpu else None,
        "loss": training.loss,
    }


def _agreed(steps: int, world: World) -> int:
    """Return rank 0's number of steps: all ranks must take as many."""
    return int(world.broadcast(torch.tensor([steps], device=world.device)).item())


def main(options: Options) -> None:
    """Measure the largest batch size that fits, and print it; the slowest rank counts."""
    config = TorchConfig(platform=part.platform(options.smoke), devices=1 if options.smoke else None)

    def of_all_ranks(batch_size: int) -> Measured:
        ranks = launch(partial(measure, options, batch_size), config)
        slowest = max(ranks, key=lambda rank: rank["seconds_per_step"])
        return {"gpus": len(ranks), **slowest}

    batches = jobs(options.smoke)[options.job].batches
    print(json.dumps(largest_that_fits(batches, of_all_ranks, torch.cuda.empty_cache)))


if __name__ == "__main__":
    main(cli.parse_plain(Options, sys.argv[1:], "python -m benchmarks.gpu.train_torch"))
