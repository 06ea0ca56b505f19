"""Gradients of the model in torch: by hand, by autograd, and averaged over DDP's ranks."""

from functools import partial

import torch
from torch import Tensor, nn

from examples.gradient_averaging import steps
from examples.gradient_averaging.problem import (
    CONTEXT,
    EMBEDDING,
    HIDDEN,
    SEED,
    Arrays,
    batch,
    draw_parameters,
    parameters,
    state_dict,
)
from jaxddp.config.options import Platform
from torch_ref.config import TorchConfig
from torch_ref.data_parallel import bare, wrap
from torch_ref.distributed import World
from torch_ref.launch import launch
from torch_ref.models import CharMLP

NORMS = ("none", "local")  # SyncBatchNorm refuses CPU tensors


def drawn() -> Arrays:
    """Draw the parameters from torch's generator."""
    generator = torch.Generator().manual_seed(SEED)
    return _numpy(draw_parameters(lambda shape: torch.randn(shape, generator=generator)))


def by_hand(arrays: Arrays, examples: Arrays, dtype: str) -> Arrays:
    """Compute the gradient of every intermediate and parameter by the hand-written backward pass."""
    return _numpy(steps.backward(torch, *_tensors(arrays, examples, dtype)))


def by_autodiff(arrays: Arrays, examples: Arrays, dtype: str) -> Arrays:
    """Compute the gradient of every intermediate and parameter by autograd."""
    p, x, y = _tensors(arrays, examples, dtype)
    for parameter in p.values():
        parameter.requires_grad_()
    loss, values = steps.remembered(torch, p, x, y)
    wanted = {**p, **values}
    return _numpy(dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True)))


def _tensors(arrays: Arrays, examples: Arrays, dtype: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    p = {name: torch.tensor(array, dtype=getattr(torch, dtype)) for name, array in arrays.items()}
    return p, torch.tensor(examples["x"]).long(), torch.tensor(examples["y"]).long()


def gradients_of_ranks(size: int, world_size: int, platform: Platform) -> dict[str, Arrays]:
    """Compute the gradients that the optimizer receives when ranks share a batch; a single rank runs without DDP.

    Args:
        size: examples of all ranks together.
        world_size: number of ranks.
        platform: "cpu" or "gpu".

    Returns:
        For each of `NORMS`, arrays by torch's names.
    """
    config = TorchConfig(devices=world_size, platform=platform, strategy="single" if world_size == 1 else "ddp")
    return {norm: _numpy(of_norm) for norm, of_norm in launch(partial(_on_rank, size), config)[0].items()}


def _on_rank(size: int, world: World, config: TorchConfig) -> dict[str, dict[str, Tensor]]:
    return {norm: _gradient(norm, size, world, config) for norm in NORMS}


def _gradient(norm: str, size: int, world: World, config: TorchConfig) -> dict[str, Tensor]:
    share = {name: torch.tensor(array).chunk(world.world_size)[world.rank] for name, array in batch(size).items()}
    x, y = (share[name].to(world.device, torch.int64) for name in ("x", "y"))
    weights = state_dict(parameters(), batch_norm=norm != "none")
    model = CharMLP(len(weights["fc2.bias"]), CONTEXT, EMBEDDING, HIDDEN)
    if norm == "none":
        model.add_module("bn", nn.Identity())
    model.load_state_dict({name: torch.tensor(array) for name, array in weights.items()}, strict=False)
    ranks = wrap(model.to(world.device, torch.float64), world, config.strategy)
    nn.functional.cross_entropy(ranks(x), y).backward()
    return {name: p.grad.cpu() for name, p in bare(ranks).named_parameters() if p.grad is not None}


def _numpy(tensors: dict[str, Tensor]) -> Arrays:
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}
