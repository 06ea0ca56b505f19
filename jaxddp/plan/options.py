"""Flags of `python -m jaxddp.plan`: machines and outputs, and the trainer's flags that change a step's program."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxddp import cli
from jaxddp.config import TrainerConfig
from jaxddp.config.choices import MODELS
from jaxddp.config.hardware import GPUS, GPUS_PER_NODE
from jaxddp.config.options import BuiltInOptions, Communication, Optimizer, Parameters, Precision, Schedule, Step
from jaxddp.errors import InputError, check_name
from jaxddp.files import check_files, mark_of_picture
from jaxddp.plan.presets import PRESETS
from jaxddp.program import Program, check_flags, config_class, default_config

WRITER, PROGRAM = "jaxddp.plan", b"// jaxddp.plan --program\n"  # begin the files, to be known again
PER_NODE, MOST_NODES = (1, 2, 4, 8), 128


@dataclass(frozen=True)
class Machines:
    """Machines to plan for, and what to write."""

    gpu: str = "h100"
    """a100 | h100 | h200."""
    gpus: int = GPUS_PER_NODE
    """GPUs per node; a multiple of 8 above it is the number of all GPUs, 8 on a node."""
    nodes: int = 1
    """Nodes, connected by InfiniBand."""
    batch_size: int | None = None
    """Examples per GPU and step. None: --global-batch-size over all GPUs, a file's rounded up; gpt2-124m 16,
    resnet50 128."""
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
        if self.gpus > GPUS_PER_NODE and self.gpus % GPUS_PER_NODE == 0 and self.nodes == 1:
            object.__setattr__(self, "nodes", self.gpus // GPUS_PER_NODE)
            object.__setattr__(self, "gpus", GPUS_PER_NODE)
        if self.gpus not in PER_NODE:
            raise InputError(f"--gpus {self.gpus}: must be 1, 2, 4 or 8, the GPUs of one node; or a multiple of 8, all")
        if not 1 <= self.nodes <= MOST_NODES:
            raise InputError(f"--nodes {self.nodes}: must be from 1 to {MOST_NODES}")
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"--batch-size {self.batch_size}: must be at least 1")
        if self.measured is not None and not 0 < self.measured < float("inf"):
            raise InputError(f"--measured {self.measured}: must be a number of seconds above 0")
        check_files({"--picture": (self.picture, mark_of_picture(WRITER)), "--program": (self.program, PROGRAM)})


@dataclass(frozen=True)
class PlanTrainerOptions(Precision, Communication, Step, Schedule, Optimizer, Parameters, Machines):
    """Predict what a run on GPUs will do, without the GPUs: memory, time, messages, scaling.

    The training step is compiled for the GPUs by XLA; times come from a roofline and a link model, and are predicted,
    not measured. RUN.py, as the first argument, is your program, with its options as flags; its file is executed.
    """

    def __post_init__(self) -> None:
        Machines.__post_init__(self)

    def of_trainer(self, program: Program) -> TrainerConfig:
        """Return the configuration of the trainer with the same flags.

        Raises:
            InputError: a flag has no effect.
        """
        default = default_config(program, TrainerConfig)
        names = {field.name for field in dataclasses.fields(default)}
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name in names}
        config = dataclasses.replace(default, **values)
        config.check_used(baseline=default)
        check_flags(program, config)
        return config

    @property
    def world_size(self) -> int:
        """GPUs of the run."""
        return self.gpus * self.nodes


@dataclass(frozen=True)
class PlanOptions(PlanTrainerOptions, BuiltInOptions):
    """Predict what a run on GPUs will do, without the GPUs: memory, time, messages, scaling.

    The training step is compiled for the GPUs by XLA; times come from a roofline and a link model, and are predicted,
    not measured. Models: the trainer's, with the trainer's flags; gpt2-124m, resnet50; or yours: RUN.py, as the first
    argument, is your program, with its options as flags; its file is executed.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("--model", self.model, (*MODELS, *PRESETS))

    def of_trainer(self, program: Program) -> TrainerConfig:
        """Return the configuration of the trainer; that of its default model beside a preset."""
        model = self.model if self.model in MODELS else BuiltInOptions.model
        return PlanTrainerOptions.of_trainer(dataclasses.replace(self, model=model), program)


def parse(argv: Sequence[str], prog: str) -> tuple[PlanTrainerOptions, Program]:
    """Load the run file that the first argument names, or the built-in program, and parse the flags for it.

    Raises:
        InputError: the file cannot be used, or a flag has a bad value.
        SystemExit: with code 0, after --help.
    """
    program, flags = cli.program_of_flags(argv)
    kind = config_class(program, PlanTrainerOptions)
    names = {field.name for field in dataclasses.fields(kind)}
    default = kind(**{name: value for name, value in program.defaults.items() if name in names})
    return cli.parse_plain(kind, flags, prog, default), program
