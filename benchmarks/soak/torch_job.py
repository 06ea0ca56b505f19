"""Rank of a job as torch's documentation has it: DDP under torchrun, with torch.distributed.checkpoint.

It trains what `jaxddp.train --model convnet` trains, saves every so many seconds, keeps the two newest checkpoints, and
goes on from the newest whose metadata is written. Rank 0 writes every 50th step to `steps.jsonl`.

Source: docs.pytorch.org/tutorials/recipes/distributed_checkpoint_recipe.html
"""

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from jaxddp.config import TrainConfig
from jaxddp.data import datasets
from torch_ref import models

KEPT = 2
LOG_EVERY = 50  # steps


class Progress(Stateful):
    """Model, optimizer and number of steps."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        """Return all that a checkpoint holds."""
        of_model, of_optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": of_model, "optimizer": of_optimizer, "step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what a checkpoint holds."""
        kinds = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **kinds)
        self.step = int(state["step"])


def main(folder: Path, every: float) -> None:
    """Train until killed, with a checkpoint every `every` seconds."""
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    config = TrainConfig(model="convnet")
    dataset = datasets.load(config)
    model = DistributedDataParallel(models.build(config, dataset))
    progress = Progress(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    if newest := complete(folder)[-1:]:
        checkpoint.load({"progress": progress}, checkpoint_id=newest[0])
    saved = time.monotonic()
    with Path(folder, "steps.jsonl").open("a") as log:
        for images, labels in batches(config, dataset, progress.step):
            progress.optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            progress.optimizer.step()
            progress.step += 1
            if distributed.get_rank() == 0 and progress.step % LOG_EVERY == 0:
                print(json.dumps({"step": progress.step, "loss": loss.item()}), file=log, flush=True)
            due = torch.tensor(time.monotonic() - saved > every)
            distributed.broadcast(due, 0)
            if due:
                save(folder, progress)
                saved = time.monotonic()


def batches(config: TrainConfig, dataset: datasets.Dataset, step: int) -> Iterator[list[Tensor]]:
    """Yield this rank's batches from a step on, without end."""
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    images, labels = (torch.from_numpy(dataset.train[name]) for name in ("x", "y"))
    data = TensorDataset(images, labels.long())
    sampler: DistributedSampler[Any] = DistributedSampler(data, world_size, rank, seed=config.seed)
    loader = DataLoader(data, config.global_batch_size // world_size, sampler=sampler, drop_last=True)
    first = step % len(loader)
    while True:
        sampler.set_epoch(step // len(loader))
        for number, batch in enumerate(loader):
            if number >= first:
                yield batch
                step += 1
        first = 0


def save(folder: Path, progress: Progress) -> None:
    """Save, and remove what is older than the newest complete checkpoints."""
    checkpoint.save({"progress": progress}, checkpoint_id=folder / f"{progress.step:09d}")
    if distributed.get_rank() == 0:
        for old in complete(folder)[:-KEPT]:
            shutil.rmtree(old)


def complete(folder: Path) -> list[Path]:
    """Return the checkpoints whose metadata is written, oldest first."""
    return sorted(path.parent for path in folder.glob("*/.metadata"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
