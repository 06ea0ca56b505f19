"""Fine-tune by transformers' LlamaForSequenceClassification under torch's DistributedDataParallel."""

from collections.abc import Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
import transformers
from safetensors.numpy import load_file
from torch import Tensor, nn

from examples.fine_tune.double import in_float64
from examples.fine_tune.job import SHOWN, Job, Run
from torch_ref import optim
from torch_ref.config import TorchConfig
from torch_ref.data_parallel import wrap
from torch_ref.distributed import World
from torch_ref.launch import launch
from torch_ref.loader import Loader, evaluation_batches
from torch_ref.losses import Batch
from torch_ref.weights import load_weights


def run(config: TorchConfig, jobs: Sequence[Job]) -> list[Run]:
    """Run the jobs one after the other on all ranks; return rank 0's results."""
    results = launch(partial(on_rank, jobs=jobs), config)[0]
    return [Run(**{name: _to_numpy(value) for name, value in of_job.items()}) for of_job in results]


def on_rank(world: World, config: TorchConfig, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Run the jobs on one rank."""
    return [fine_tune(world, config, job) for job in jobs]


def fine_tune(world: World, config: TorchConfig, job: Job) -> dict[str, Any]:
    """Train one model; return the fields of `Run` on rank 0, nothing on the others."""
    model: Any = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**job.sizes))
    load_weights(f"{job.folder}/model.safetensors", model)
    model.to(world.device, getattr(torch, job.dtype))
    train, test = (load_file(f"{job.folder}/{part}.safetensors") for part in ("train", "test"))
    shown = {name: torch.from_numpy(array[:SHOWN]).to(world.device) for name, array in test.items()}
    results: dict[str, Any] = {}
    if job.dtype == "float64":
        results["unmodified"] = _logits(model, shown).cpu()
        in_float64(model)
    results["logits"] = _logits(model, shown).cpu()

    loader = Loader(train, config, world.world_size, [world.rank], world.device)
    steps = config.epochs * loader.steps_per_epoch
    optimizer, _ = optim.from_config(model.parameters(), config, steps)
    ddp = wrap(model, world)
    losses: list[float] = []
    batches = chain.from_iterable(map(loader.epoch, range(config.epochs)))
    for [batch] in islice(batches, job.steps):
        optimizer.zero_grad()
        loss = ddp(**batch).loss
        loss.backward()
        if job.whole and not losses:
            results["gradients"] = {name: parameter.grad.clone().cpu() for name, parameter in model.named_parameters()}
        optimizer.step()
        losses.append(world.all_reduce(loss.detach().double(), "mean").item())
    if job.whole:
        results["parameters"] = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    else:
        results["accuracy"] = _accuracy(model, test, config, world)
    return {**results, "losses": losses} if world.rank == 0 else {}


def _accuracy(model: nn.Module, test: dict[str, Any], config: TorchConfig, world: World) -> float:
    right = torch.zeros((), device=world.device)
    for batch in evaluation_batches(test, config, world, batch_size=32):
        right += (_logits(model, batch).argmax(-1) == batch["labels"]).sum()
    return world.all_reduce(right).item() / len(test["labels"])


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        return model(batch["input_ids"], batch["attention_mask"]).logits


def _to_numpy(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _to_numpy(tensor) for name, tensor in value.items()}
    return value.double().numpy() if isinstance(value, Tensor) else value
