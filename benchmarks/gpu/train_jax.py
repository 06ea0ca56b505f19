"""Speed of a job in jaxddp at the largest batch that fits: the models of `jaxddp.plan.presets` with random weights."""

from collections.abc import Iterator
from itertools import chain, count
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks.gpu.jobs import LR, GpuJob, jobs, platform
from benchmarks.gpu.timing import largest_that_fits, median_seconds
from jaxddp import DistributedDataParallel, Loader, Replicas, optim
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.devices import prepare
from jaxddp.plan.presets import GPT2, Attention, ResNet50
from jaxddp.state import Params

LOADED_BATCHES = 4  # of the data set with which the loader is timed


def measure(job: str, smoke: bool, attention: Attention = None) -> dict[str, Any]:
    """Measure the largest batch size of a job that fits, with an implementation of the decoder's attention."""
    chosen = jobs(smoke)[job]
    devices = prepare(1 if smoke else None, platform(smoke))

    def of_batch(size: int) -> dict[str, Any]:
        training = Training(chosen, devices, size, attention)
        return {
            "seconds_per_step": median_seconds(training.steps, chosen.seconds),
            "seconds_per_step_with_loader": median_seconds(training.loaded_steps, chosen.seconds, rounds=3),
            "peak_bytes": (devices[0].memory_stats() or {}).get("peak_bytes_in_use"),
            "loss": training.loss,
        }

    measured = largest_that_fits(chosen.batches, of_batch, jax.clear_caches)
    return {"gpus": len(devices), "device": devices[0].device_kind, **measured}


def model_of(job: GpuJob, attention: Attention = None) -> nnx.Module:
    """Build a job's model, whose weights are zeros."""
    if job.kind == "decoder":
        return GPT2(**job.sizes, attention=attention)
    return ResNet50(job.sizes["blocks"], job.sizes["classes"])


def random_weights(params: Params) -> dict[str, Any]:
    """Replace weights of layers by random ones, of the size that keeps activations the same; zeros would be faster."""
    rng = np.random.default_rng(0)

    def drawn(array: Any) -> Any:
        if array.ndim < 2:
            return array
        return (rng.standard_normal(array.shape, np.float32) * np.prod(array.shape[:-1]) ** -0.5).astype(array.dtype)

    return {name: drawn(array) for name, array in params.items()}


class Training:
    """A job on all devices, with one step per dispatch.

    Args:
        job: the job.
        devices: one per replica.
        batch_size: examples per replica.
        attention: implementation of the decoder's attention; None: jax's default.
    """

    def __init__(self, job: GpuJob, devices: list[jax.Device], batch_size: int, attention: Attention = None):
        self._replicas = Replicas(devices)
        self._ddp = DistributedDataParallel(model_of(job, attention), optim.adam(LR), replicas=self._replicas)
        self._state = self._ddp.init(params=random_weights(self._ddp.functional.params))
        arrays = job.arrays(batch_size)
        batch = {name: np.broadcast_to(array, (len(devices), 1, *array.shape)) for name, array in arrays.items()}
        self._batch = self._replicas.shard(MicroBatches(None, batch))
        examples = {name: np.concatenate([array] * LOADED_BATCHES * len(devices)) for name, array in arrays.items()}
        size = batch_size * len(devices)
        loader = Loader(examples, self._replicas, global_batch_size=size, steps_per_dispatch=1)
        self._loaded: Iterator[MicroBatches] = chain.from_iterable(map(loader.epoch, count()))
        self.loss = float("nan")

    def steps(self, steps: int) -> None:
        """Take steps on a batch that is on the devices already, and wait for them."""
        self._steps(self._batch for _ in range(steps))

    def loaded_steps(self, steps: int) -> None:
        """Take steps on batches from the host's memory, and wait for them."""
        self._steps(next(self._loaded) for _ in range(steps))

    def _steps(self, batches: Iterator[MicroBatches]) -> None:
        for batch in batches:
            self._state, sums = self._ddp.steps(self._state, batch)
        self.loss = float(sums["loss"][-1]) / float(sums["count"][-1])
