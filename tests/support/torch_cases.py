"""Small runs that the tests of torch_ref share."""

import dataclasses
from pathlib import Path

from torch_ref.config import TorchConfig
from torch_ref.distributed import World
from torch_ref.train import train

TOLERANCE = 1e-12  # float64, of scale 1; measured: at most 4e-16
RANKS = 2

# 61 examples are padded to 62, 31 per replica, so that the last of 4 steps has 7 examples on each instead of 8.
BASE = TorchConfig(
    dataset="linear",
    num_examples=61,
    num_features=5,
    hidden_sizes=(8,),
    global_batch_size=16,
    epochs=3,
    lr=0.05,
    seed=3,
    devices=RANKS,
    platform="cpu",
    dtype="float64",
    verify_every=1,
)


def case(**changes: object) -> TorchConfig:
    """Return `BASE` with changes."""
    return dataclasses.replace(BASE, **changes)


# The last step's micro-batches have 4 and 3 examples, whose mean of means is not the mean over 7.
CASES = {
    "plain": BASE,
    "sgd_accumulated": case(optimizer="sgd", momentum=0.9, accumulation_steps=2, drop_last=True),
    "global_clipped": case(loss_normalization="global", accumulation_steps=2, clip_grad_norm=0.3),
    "one_cycle": case(schedule="one_cycle", optimizer="adamw", drop_last_batch=True),
}


def small(folder: Path, **changes: object) -> TorchConfig:
    """Return a run of 4 epochs of 4 steps in this process, with a checkpoint after the second and the fourth epoch."""
    settings = {"dtype": "float32", "devices": 1, "epochs": 4, "checkpoint_every": 2, "optimizer": "adamw"}
    settings |= {"schedule": "warmup_cosine", "warmup_steps": 3, "output": str(folder)}
    return case(**{**settings, **changes})


def train_whole_and_in_parts(world: World, config: TorchConfig) -> None:
    """Train two epochs in one run and in two; the ranks are started once for all runs."""
    whole, parts = (dataclasses.replace(config, output=f"{config.output}/{name}") for name in ("whole", "parts"))
    train(world, whole)
    train(world, dataclasses.replace(parts, epochs=1))
    train(world, dataclasses.replace(parts, resume=parts.output))
