"""Parts of a training run, and what it ends with."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from jaxddp.config import TrainerConfig
from jaxddp.config.hardware import GPUS
from jaxddp.config.period import Period
from jaxddp.data.run_data import RunData
from jaxddp.data_parallel import DistributedDataParallel
from jaxddp.distributed.agreement import Agreement
from jaxddp.distributed.devices import most_memory
from jaxddp.errors import DriftError, tell
from jaxddp.loader import Loader
from jaxddp.nn.torch_weights import to_torch, torch_name
from jaxddp.program import Program
from jaxddp.state import TrainState
from jaxddp.step.dispatch import Pace
from jaxddp.tracking.gradient_metrics import explained
from jaxddp.tracking.throughput import Throughput


@dataclass(frozen=True)
class Run:
    """Parts of a run, which have been checked to fit each other; nothing has been written yet."""

    config: TrainerConfig
    program: Program
    data: RunData
    loader: Loader
    ddp: DistributedDataParallel
    start: TrainState
    throughput: Throughput = field(default_factory=Throughput)
    lines: list[str] = field(default_factory=list)
    """Lines below the title, on what --weights-partial leaves out."""

    @cached_property
    def pace(self) -> Pace:
        """Steps per dispatch and dispatches in flight; before its use, the loader has the most steps per dispatch."""

        def choose(most: int) -> int:
            return self.loader.choose_steps_per_dispatch(1 if self.ddp.one_by_one else most)

        return Pace(choose, Agreement(self.ddp.replicas, delay=0))

    @property
    def callback_period(self) -> Period:
        """Time between calls of the program's `on_step_end`; 0 without one."""
        return Period(self.config.callback_every if self.program.get("on_step_end") else 0, "steps")

    @property
    def saved_config(self) -> TrainerConfig:
        """Configuration as the run folder keeps it, with the number of devices."""
        return dataclasses.replace(self.config, resume=None, devices=self.ddp.world_size)

    @property
    def is_first(self) -> bool:
        """Return whether this process prints, logs and saves weights: the one that has replica 0."""
        return 0 in self.ddp.replicas.local_ranks

    def peak_memory(self) -> int | None:
        """Return the most bytes that were in use on a device of this process; None where devices do not count them."""
        return most_memory(self.ddp.replicas.devices, "peak_bytes_in_use")

    def share_of_peak(self, examples_per_second: float) -> str | None:
        """Describe the share of its GPU's peak that the products reach; None for a device that is not known."""
        known = [gpu for gpu in GPUS.values() if gpu.name == self.ddp.replicas.devices[0].device_kind]
        if not known:
            return None
        config = self.config
        dtype = {"bf16": "bf16", "fp16": "f16"}.get(config.amp, {"float32": "f32", "float64": "f64"}[config.dtype])
        flops = self.ddp.product_flops(self.start, self.loader.smallest_batch())
        share = flops * examples_per_second / known[0].flops_per_second(dtype)
        return f"{share:.1%} of the {dtype} peak"

    def compiled(self) -> list[str]:
        """Return a line on the programs compiled for batches of the program's `collate`, if it has one."""
        if self.program.get("collate") is None:
            return []
        steps, tests = self.ddp.programs
        return [f"programs compiled, one for each shape of batch: {steps} for steps, {tests} for tests"]

    def weights(self, state: TrainState) -> dict[str, np.ndarray]:
        """Return parameters and buffers of a state as they are saved; a collective of all processes."""
        params, buffers = self.ddp.values(state)
        if self.program.get("names"):  # torch's names are others than those that jaxddp would give
            return {name: np.asarray(x) for name, x in (params | buffers).items()}
        values: dict[str, Any] = {**params, **buffers}
        return to_torch(values)

    def explain(self, sums: Mapping[str, float]) -> str | None:
        """Describe the gradients that are not finite, from a step's metrics; None without --detect-anomaly."""
        frozen = self.ddp.frozen_parameters
        learning = [name for name in self.ddp.functional.params if name not in frozen]
        return explained(sums, learning, torch_name) if self.config.detect_anomaly else None

    def verified(self, state: TrainState) -> TrainState:
        """Return a state that is equal on all replicas: the given one or, with --on-drift repair, the majority's.

        Raises:
            DriftError: replicas differ, and are not to be repaired or have no majority.
        """
        try:
            self.ddp.verify(state)
        except DriftError as error:
            if self.config.on_drift != "repair" or error.healthy is None:
                raise
            if self.is_first:
                tell(f"{error}; repaired from replica {error.healthy}")
            return self.ddp.repaired(state, error.healthy)
        return state

    def at_epoch_end(self, step: int) -> bool:
        """Return whether an epoch ends with this step."""
        return step % self.loader.steps_per_epoch == 0


@dataclass(frozen=True)
class Result:
    """What a run ends with.

    Attributes:
        state: the final state, on the devices.
        metrics: metrics of the last test, by name; of the training set, if there is no test set.
        weights: parameters and buffers under torch's names, or under the model's own, as in model.safetensors.
    """

    state: TrainState
    metrics: dict[str, float]
    weights: dict[str, np.ndarray]
