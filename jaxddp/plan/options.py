"""Flags of `python -m jaxddp.plan`: machines and outputs, and the trainer's flags that change a step's program."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from jaxddp.config import TrainConfig
from jaxddp.config.choices import MODELS
from jaxddp.config.options import Communication, Data, Model, Optimizer, Precision, Schedule, Step
from jaxddp.errors import InputError, check_name
from jaxddp.files import check_file
from jaxddp.plan.hardware import GPUS, GPUS_PER_NODE
from jaxddp.plan.presets import PRESETS

PER_NODE, MOST_NODES = (1, 2, 4, 8), 128


@dataclass(frozen=True)
class Machines:
    """Machines to plan for, and what to write."""

    script: Annotated[Positional[Path | None], arg(metavar="SCRIPT.py")] = None
    """Your model: flax_model, flax_loss, flax_optimizer and batch, named as in a port file. The file is executed."""
    gpu: str = "h100"
    """a100 | h100 | h200."""
    gpus: int = GPUS_PER_NODE
    """GPUs per node."""
    nodes: int = 1
    """Nodes, connected by InfiniBand."""
    batch_size: int | None = None
    """Examples per GPU and step. None: --global-batch-size over all GPUs; gpt2-124m 16, resnet50 128."""
    largest_batch: bool = True
    """Estimate the largest batch that fits, which compiles the program two more times."""
    measured: float | None = None
    """Measured seconds per step on these GPUs, to be compared with the prediction."""
    picture: Path | None = None
    """Draw the prediction for 1 to 1,024 GPUs into this PNG file."""
    program: Path | None = None
    """Write the compiled program to this file, as HLO text."""

    def __post_init__(self) -> None:
        check_name("--gpu", self.gpu, GPUS)
        if self.gpus not in PER_NODE:
            raise InputError(f"--gpus {self.gpus}: must be 1, 2, 4 or 8, the GPUs of one node; --nodes has more")
        if not 1 <= self.nodes <= MOST_NODES:
            raise InputError(f"--nodes {self.nodes}: must be from 1 to {MOST_NODES}")
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"--batch-size {self.batch_size}: must be at least 1")
        if self.measured is not None and not 0 < self.measured < float("inf"):
            raise InputError(f"--measured {self.measured}: must be a number of seconds above 0")
        for path in (self.picture, self.program):
            if path is not None:
                check_file(path)


@dataclass(frozen=True)
class PlanOptions(Precision, Communication, Step, Schedule, Optimizer, Model, Data, Machines):
    """Predict what a run on GPUs will do, without the GPUs: memory, time, messages, scaling.

    The training step is compiled for the GPUs by XLA; times come from a roofline and a link model, and are predicted,
    not measured. Models: the trainer's, with the trainer's flags; gpt2-124m, resnet50; or yours, in a script.
    """

    def __post_init__(self) -> None:
        Machines.__post_init__(self)
        check_name("--model", self.model, (*MODELS, *PRESETS))
        if self.script is not None and self.model != Model.model:
            raise InputError(f"--model {self.model}: must not be given with {self.script}, which has a model")
        self.config.check_used(baseline=TrainConfig())

    @property
    def config(self) -> TrainConfig:
        """Configuration of the trainer with the same flags; that of its default model beside a preset or script."""
        machines = {field.name for field in dataclasses.fields(Machines)}
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values |= {"model": self.model if self.model in MODELS else Model.model}
        return TrainConfig(**{name: value for name, value in values.items() if name not in machines})

    @property
    def world_size(self) -> int:
        """GPUs of the run."""
        return self.gpus * self.nodes
