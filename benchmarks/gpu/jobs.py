"""Jobs whose utilisation is measured: sizes, batches, data and contenders; needs neither jax nor torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jaxddp.config.options import Platform

LR = 1e-4
FLOPS = "flops"  # the row with the operations of the jobs' models

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class GpuJob:
    """A model that trains in bf16 with Adam.

    Attributes:
        description: the model in a few words.
        kind: which model.
        sizes: its sizes.
        batches: examples per GPU that are tried, the largest first.
        profiled: examples per GPU of the profile.
        seconds: length of a timed round.
    """

    description: str
    kind: Literal["decoder", "convnet"]
    sizes: Mapping[str, Any]
    batches: tuple[int, ...]
    profiled: int
    seconds: float = 1.0

    def arrays(self, examples: int) -> Arrays:
        """Draw random inputs x and labels y."""
        rng = np.random.default_rng(0)
        if self.kind == "decoder":
            tokens = rng.integers(0, self.sizes["vocabulary"], (examples, self.sizes["length"] + 1), np.int32)
            return {"x": tokens[:, :-1], "y": tokens[:, 1:]}
        shape = (examples, self.sizes["image"], self.sizes["image"], 3)
        y = rng.integers(0, self.sizes["classes"], examples, np.int32)
        return {"x": rng.standard_normal(shape, np.float32), "y": y}


def jobs(smoke: bool) -> dict[str, GpuJob]:
    """Return the jobs by name: those of GPT-2's and ResNet-50's size, or tiny ones.

    >>> list(jobs(smoke=False))
    ['decoder', 'convnet']
    """
    if smoke:
        decoder = {"layers": 1, "width": 16, "heads": 2, "length": 16, "vocabulary": 64}
        convnet = {"blocks": (1,), "classes": 10, "image": 16}
        return {
            "decoder": GpuJob("decoder, tiny", "decoder", decoder, (2,), 2, 0.02),
            "convnet": GpuJob("convnet, tiny", "convnet", convnet, (2,), 2, 0.02),
        }
    decoder = {"layers": 12, "width": 768, "heads": 12, "length": 1024, "vocabulary": 50_304}
    convnet = {"blocks": (3, 4, 6, 3), "classes": 1000, "image": 224}
    return {
        "decoder": GpuJob("124M decoder, 1,024 tokens", "decoder", decoder, (64, 32, 16, 8), 16),
        "convnet": GpuJob("ResNet-50, 224x224", "convnet", convnet, (512, 256, 128, 64), 128),
    }


@dataclass(frozen=True)
class GpuContender:
    """A trainer of the jobs: its label, its module in `benchmarks`, and further arguments of `measure` there."""

    label: str
    module: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


CONTENDERS = {
    "jaxddp": GpuContender("jaxddp as it comes", "gpu.train_jax"),
    "jaxddp_cudnn": GpuContender("jaxddp, attention fused by cuDNN", "gpu.train_jax", {"attention": "cudnn"}),
    "torch": GpuContender("torch DDP", "gpu.train_torch"),
    "torch_compile": GpuContender("torch.compile of torch DDP", "gpu.train_torch", {"compiled": True}),
}


def row_name(job: str, contender: str) -> str:
    """Return the name of a contender's row."""
    return f"{job}, {contender}"


def platform(smoke: bool) -> Platform:
    """Return the platform of a measurement."""
    return "cpu" if smoke else "gpu"
