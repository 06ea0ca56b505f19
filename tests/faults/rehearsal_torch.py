"""What torch's DistributedDataParallel does with a scenario, in one process: the ranks take turns."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jaxddp.parity.port import Port

from .scenarios import Scenario

Stages = dict[str, Any]


def start(scenario: Scenario) -> dict[str, np.ndarray]:
    """The state_dict that the scenario's seed draws, in float64."""
    return {name: _numpy(tensor) for name, tensor in _model(scenario).state_dict().items()}


def run(scenario: Scenario) -> Iterator[Stages]:
    """Every step's stages, and "norm", that of the averaged gradients."""
    port = scenario.port()
    model = _model(scenario)
    assert port.torch_optimizer is not None and port.torch_scheduler is not None
    optimizer = port.torch_optimizer(model.parameters())
    scheduler = port.torch_scheduler(optimizer)
    for step in range(scenario.steps):
        ranks = [_backward(port, model, scenario, step, rank) for rank in range(scenario.world_size)]
        local = [{name: p.grad for name, p in rank.named_parameters() if p.grad is not None} for rank, _ in ranks]
        gradients = {name: sum(of[name] for of in local) / scenario.world_size for name in local[0]}
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.grad = gradients[name].clone() if name in gradients else None
        norm = nn.utils.clip_grad_norm_(model.parameters(), port.clip_grad_norm)
        clipped = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        scheduler.step()
        for buffer, of_rank0 in zip(model.buffers(), ranks[0][0].buffers(), strict=True):
            buffer.copy_(of_rank0)
        yield {
            "local_loss": np.array([loss for _, loss in ranks]),
            "local_gradients": {name: np.stack([_numpy(of[name]) for of in local]) for name in gradients},
            "gradients": {name: _numpy(g) for name, g in gradients.items()},
            "clipped_gradients": {name: _numpy(g) for name, g in clipped.items()},
            "update": {name: _numpy(p - before[name]) for name, p in model.named_parameters()},
            "buffers": {name: _numpy(b) for name, b in model.named_buffers()},
            "norm": float(norm),
        }


def _model(scenario: Scenario) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(scenario.seed)
        return scenario.port().torch_model().double()


def _backward(port: Port, model: nn.Module, scenario: Scenario, step: int, rank: int) -> tuple[nn.Module, float]:
    """A replica with its own gradients and buffers, and its loss."""
    replica, total = copy.deepcopy(model), 0.0
    replica.zero_grad()
    for micro_batch in port.micro_batches(step, rank):
        found = port.torch_loss(replica, _tensors(micro_batch))
        if isinstance(found, tuple):
            loss = (found[0] * found[1]).sum() * scenario.world_size / valid_labels(scenario, step).sum()
        else:
            loss = found / port.accumulation_steps
        loss.backward()
        total += loss.item()
    return replica, total


def valid_labels(scenario: Scenario, step: int) -> np.ndarray:
    """Labels that count, of every rank and micro-batch: shape (W, A)."""
    port = scenario.port()
    return np.array(
        [[(part["y"] >= 0).sum() for part in port.micro_batches(step, rank)] for rank in range(scenario.world_size)]
    )


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().clone().numpy()
