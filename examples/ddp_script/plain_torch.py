"""A DDP script without helpers: torchrun --standalone --nproc-per-node 2 -m examples.ddp_script.plain_torch"""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # if DDP imports it, after the group exists, torch 2.13 may abort at exit
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, ACCUMULATE, LR, MAX_NORM = 5, 16, 2, 1e-2, 0.5


def rings(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw points of a plane; the label of a point is the ring around 0 that contains it."""
    x = np.random.default_rng(seed).normal(size=(count, 2)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(np.digitize(np.hypot(*x.T), [0.8, 1.5]))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.relu(self.inner(x)))


def main(rank: int, world_size: int) -> None:
    train, (x_test, y_test) = TensorDataset(*rings(1024, seed=1)), rings(301, seed=2)
    sampler: DistributedSampler = DistributedSampler(train)
    loader = DataLoader(train, BATCH, sampler=sampler)
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader) // ACCUMULATE)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for i, (x, y) in enumerate(loader, start=1):
            with nullcontext() if i % ACCUMULATE == 0 else model.no_sync():
                loss = cross_entropy(model(x), y)
                (loss / ACCUMULATE).backward()
            if i % ACCUMULATE == 0:
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += loss.detach() * len(x)
        with torch.no_grad():
            out, labels = model.module(x_test[rank::world_size]), y_test[rank::world_size]
            sums = torch.stack([total, cross_entropy(out, labels, reduction="sum"), (out.argmax(-1) == labels).sum()])
        dist.all_reduce(sums)
        train_loss, test_loss, accuracy = sums / torch.tensor([len(train), len(x_test), len(x_test)])
        if rank == 0:
            print(f"epoch {epoch + 1}  train loss {train_loss:.5f}  test loss {test_loss:.5f}  accuracy {accuracy:.3f}")
    if rank == 0:
        Path("runs").mkdir(exist_ok=True)
        torch.save(model.module.state_dict(), "runs/plain_torch.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
