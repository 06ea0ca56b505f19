"""Jobs whose utilisation is measured: sizes, batches and data; needs neither jax nor torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

LR = 1e-4

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Job:
    """A model that trains in bf16 with Adam.

    Attributes:
        name: name in the tables.
        description: the model in a few words.
        kind: which model.
        sizes: its sizes.
        batches: examples per GPU that are tried, the largest first.
        profiled: examples per GPU of the profile.
    """

    name: str
    description: str
    kind: Literal["decoder", "convnet"]
    sizes: Mapping[str, Any]
    batches: tuple[int, ...]
    profiled: int

    def arrays(self, examples: int) -> Arrays:
        """Draw random inputs x and labels y."""
        rng = np.random.default_rng(0)
        if self.kind == "decoder":
            tokens = rng.integers(0, self.sizes["vocabulary"], (examples, self.sizes["length"] + 1), np.int32)
            return {"x": tokens[:, :-1], "y": tokens[:, 1:]}
        shape = (examples, self.sizes["image"], self.sizes["image"], 3)
        y = rng.integers(0, self.sizes["classes"], examples, np.int32)
        return {"x": rng.standard_normal(shape, np.float32), "y": y}


def jobs(smoke: bool) -> dict[str, Job]:
    """Return the jobs by name: those of GPT-2's and ResNet-50's size, or tiny ones.

    >>> list(jobs(smoke=False))
    ['decoder', 'convnet']
    """
    decoder = {"layers": 12, "width": 768, "heads": 12, "length": 1024, "vocabulary": 50_304}
    convnet: dict[str, Any] = {"blocks": (3, 4, 6, 3), "classes": 1000, "image": 224}
    texts = "124M decoder, 1,024 tokens", "ResNet-50, 224x224"
    batches: list[tuple[int, ...]] = [(64, 32, 16, 8), (512, 256, 128, 64)]
    if smoke:
        decoder = {"layers": 1, "width": 16, "heads": 2, "length": 16, "vocabulary": 64}
        convnet = {"blocks": (1,), "classes": 10, "image": 16}
        texts = "decoder, tiny", "convnet, tiny"
        batches = [(2,), (2,)]
    return {
        "decoder": Job("decoder", texts[0], "decoder", decoder, batches[0], 2 if smoke else 16),
        "convnet": Job("convnet", texts[1], "convnet", convnet, batches[1], 2 if smoke else 128),
    }
