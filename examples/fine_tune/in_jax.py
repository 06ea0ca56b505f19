"""Fine-tune by jaxddp's Llama and DataParallel."""

from itertools import chain, islice
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from safetensors.numpy import load_file

from examples.fine_tune.job import SHOWN, Job, Run
from jaxddp import DataParallel, Loader, Replicas, TrainConfig, cross_entropy, optim
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.data.torch_rng import Generator
from jaxddp.models.llama import LlamaForSequenceClassification, from_pretrained
from jaxddp.models.llama_config import LlamaConfig
from jaxddp.nn.losses import Batch, Losses
from jaxddp.nn.torch_weights import to_torch
from jaxddp.state import Params, TrainState
from jaxddp.step.metrics import InFlight, means


def loss_fn(model: LlamaForSequenceClassification, batch: Batch) -> Losses:
    """Compute the cross entropy of each pair, and whether its prediction is right."""
    logits = model(batch["input_ids"], batch["attention_mask"])
    return cross_entropy(lambda x: x, {"x": logits, "y": batch["labels"]})


def run(config: TrainConfig, model_config: LlamaConfig, job: Job, replicas: Replicas) -> Run:
    """Train one model on all replicas.

    Raises:
        TrainingError: the replicas differ at the end.
    """
    with jax.enable_x64(job.dtype == "float64"):
        return _fine_tune(config, model_config, job, replicas)


def _fine_tune(config: TrainConfig, model_config: LlamaConfig, job: Job, replicas: Replicas) -> Run:
    train, test = (load_file(f"{job.folder}/{part}.safetensors") for part in ("train", "test"))
    loader = Loader(train, replicas, global_batch_size=config.global_batch_size, seed=config.seed, steps_per_dispatch=1)
    optimizer = optim.from_config(config, config.epochs * loader.steps_per_epoch)
    model = from_pretrained(job.folder, model_config, generator=Generator(config.seed))
    ddp = DataParallel(model, optimizer, loss_fn, replicas=replicas, dtype=jnp.dtype(job.dtype))
    state = ddp.init()
    logits = _logits(ddp, state, {name: array[:SHOWN] for name, array in test.items()})
    gradients = first_gradients(ddp, state, next(loader.epoch(0))) if job.whole else {}
    batches = chain.from_iterable(map(loader.epoch, range(config.epochs)))
    in_flight = InFlight(first_step=1)
    for batch in islice(batches, job.steps):
        state, sums = ddp.steps(state, batch)
        in_flight.add(sums)
    losses = [means(sums)["loss"] for _, sums in in_flight.finished(wait=True)]
    ddp.verify(state)
    if job.whole:
        return Run(losses, logits, gradients=gradients, parameters=to_torch(ddp.values(state)[0]))
    return Run(losses, logits, ddp.evaluate(state, test, batch_size=32)["accuracy"])


def first_gradients(ddp: DataParallel, state: TrainState, batch: MicroBatches) -> dict[str, np.ndarray]:
    """Return the mean gradients of a step by torch's names, averaged on the host."""
    micro_batch = {name: array[:, 0] for name, array in batch.last.items()}  # K = 1 step
    local = jax.device_get(ddp.no_sync(state, micro_batch).result)

    def mean(sums: np.ndarray) -> np.ndarray:
        return np.mean([total / count for total, count in zip(sums, local.denominator, strict=True)], axis=0)

    return to_torch({name: mean(sums) for name, sums in local.gradients.items()})


def _logits(ddp: DataParallel, state: TrainState, batch: Batch) -> np.ndarray:
    def function(params: Params) -> jax.Array:
        model: Any = ddp.functional.module(params, {})
        return model(batch["input_ids"], batch["attention_mask"])

    return np.asarray(jax.jit(function)(state.params), np.float64)
