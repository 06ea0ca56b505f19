"""Data of several lengths with the functions of a user's file, which worker processes import without a framework."""

from typing import Any

import numpy as np


class Ragged:
    """Examples of different lengths, with their index."""

    def __init__(self, size: int = 50):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return {"id": index, "ids": np.full(1 + index % 5, index, np.int32)}


def augment(example: Any, rng: np.random.Generator) -> Any:
    return example | {"noise": rng.standard_normal()}


def pad(examples: list[Any]) -> Any:
    width = 2 * -(-max(len(example["ids"]) for example in examples) // 2)  # few shapes
    ids = np.stack([np.pad(e["ids"], (0, width - len(e["ids"])), constant_values=-1) for e in examples])
    return {name: np.stack([e[name] for e in examples]) for name in ("id", "noise")} | {"ids": ids}


def by_length(epoch: int, seed: int, size: int) -> np.ndarray:
    """Draw with replacement, and bring examples of one length together."""
    drawn = np.random.default_rng([seed, epoch]).integers(0, size, 53)
    return drawn[np.argsort(drawn % 5, kind="stable")]
