# mypy: allow-untyped-defs, disable-error-code="var-annotated"
"""The PyTorch script of docs/check_your_port.md.

torchrun --nproc-per-node 2 tutorial_torch.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # else a process with gloo may abort as it exits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from jaxddp.data import digits  # a dictionary of NumPy arrays, "x" and "y"


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, 10)
        self.norm, self.drop = nn.LayerNorm(32), nn.Dropout(0.1)

    def forward(self, x):
        return self.fc2(self.drop(torch.relu(self.norm(self.fc1(x)))))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.tensor(digits()["x"]), torch.tensor(digits()["y"]).long())
    sampler = DistributedSampler(data)
    model = DDP(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 100))
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, 32, sampler=sampler):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after the DDP model is gone, which else waits for the group's thread
