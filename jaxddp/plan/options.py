"""Flags of `jaxddp plan`: machines and outputs, and the trainer's flags that change a step's program."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal, get_type_hints

from jaxddp import cli
from jaxddp.config import TrainerConfig
from jaxddp.config.choices import MODELS
from jaxddp.config.hardware import GPUS, GPUS_PER_NODE
from jaxddp.config.kinds import choices_of
from jaxddp.config.options import BuiltInOptions, Communication, Optimizer, Parameters, Precision, Schedule, Step
from jaxddp.errors import InputError, check_name, not_installed
from jaxddp.files import check_files, mark_of_picture
from jaxddp.program import Program, check_flags, config_class, default_config

WRITER, PROGRAM = "jaxddp.plan", b"// jaxddp.plan --program\n"  # begin the files, to be known again
PER_NODE, MOST_NODES = (1, 2, 4, 8), 128


@dataclass(frozen=True)
class Machines:
    """Machines to plan for, and what to write."""

    gpu: Literal["a100", "h100", "h200"] = "h100"
    """Kind of the GPUs."""
    devices: int = GPUS_PER_NODE
    """Number of GPUs over all nodes."""
    nodes: int | None = None
    """Nodes, connected by InfiniBand. None: as few as hold the GPUs, with 8 on each."""
    batch_size: int | None = None
    """Examples per GPU and step. None: --global-batch-size over all GPUs, a file's rounded up; gpt2-124m 16,
    resnet50 128."""
    largest_batch: bool = True
    """Estimate the largest batch that fits, which compiles the program two more times."""
    measured: float | None = None
    """Measured seconds per step on these GPUs, to be compared with the prediction. None: there are none."""
    picture: Path | None = None
    """Draw the prediction for 1 to 1,024 GPUs into this PNG file. None: nothing is drawn."""
    program: Path | None = None
    """Write the compiled program to this file, as HLO text. None: it is not written."""

    def __post_init__(self) -> None:
        check_name("--gpu", self.gpu, GPUS)
        if self.nodes is not None and not 1 <= self.nodes <= MOST_NODES:
            raise InputError(f"--nodes {self.nodes}: must be from 1 to {MOST_NODES}")
        if self.devices not in [count * self.num_nodes for count in PER_NODE]:
            of_nodes = ", ".join(str(count * self.num_nodes) for count in PER_NODE)
            right = f"{of_nodes} on {self.nodes} nodes" if self.nodes else "1, 2, 4 or 8, or a multiple of 8"
            raise InputError(f"--devices {self.devices}: must be {right}")
        if self.num_nodes > MOST_NODES:
            raise InputError(f"--devices {self.devices}: must be at most {MOST_NODES * GPUS_PER_NODE}")
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"--batch-size {self.batch_size}: must be at least 1")
        if self.measured is not None and not 0 < self.measured < float("inf"):
            raise InputError(f"--measured {self.measured}: must be a number of seconds above 0")
        if self.picture is not None and find_spec("matplotlib") is None:
            raise InputError(f"--picture {self.picture}: {not_installed(ModuleNotFoundError(name='matplotlib'))}")
        check_files({"--picture": (self.picture, mark_of_picture(WRITER)), "--program": (self.program, PROGRAM)})

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.nodes or max(1, self.devices // GPUS_PER_NODE)

    @property
    def per_node(self) -> int:
        """GPUs of a node."""
        return self.devices // self.num_nodes


@dataclass(frozen=True)
class PlanTrainerOptions(Precision, Communication, Step, Schedule, Optimizer, Parameters, Machines):
    """Predict what a run on GPUs will do, without the GPUs: memory, time, messages, scaling.

    The training step is compiled for the GPUs by XLA; times come from a roofline and a link model, and are predicted,
    not measured. PROGRAM.py, as the first argument, is your own model, with its options as flags; it is executed.
    """

    COMMON: ClassVar[tuple[str, ...]] = (
        *("gpu", "devices", "nodes", "batch_size", "largest_batch", "measured", "picture", "model", "optimizer", "amp"),
        *("accumulation_steps", "remat", "comm_hook"),
    )

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


@dataclass(frozen=True)
class PlanOptions(PlanTrainerOptions, BuiltInOptions):
    """Predict what a run on GPUs will do, without the GPUs: memory, time, messages, scaling.

    The training step is compiled for the GPUs by XLA; times come from a roofline and a link model, and are predicted,
    not measured. PROGRAM.py, as the first argument, is your own model, with its options as flags; it is executed.
    """

    model: Literal["linear", "mlp", "char_mlp", "convnet", "gpt2-124m", "resnet50"] = "mlp"  # type: ignore[assignment]
    """Model: one of the trainer's, with the trainer's flags, or a larger one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("--model", self.model, choices_of(get_type_hints(PlanOptions)["model"]))

    def of_trainer(self, program: Program) -> TrainerConfig:
        """Return the configuration of the trainer; a preset gets that of the default model."""
        model = self.model if self.model in MODELS else BuiltInOptions.model
        return PlanTrainerOptions.of_trainer(dataclasses.replace(self, model=model), program)


def parse(argv: Sequence[str], prog: str) -> tuple[PlanTrainerOptions, Program]:
    """Load the program that the first argument names, or the built-in program, and parse the flags for it.

    Raises:
        InputError: the file cannot be used, or a flag has a bad value.
        SystemExit: with code 0, after --help.
    """
    program, flags = cli.program_of_flags(argv)
    default_config(program, TrainerConfig)  # checks the values that the file sets
    kind = config_class(program, PlanTrainerOptions)
    names = {field.name for field in dataclasses.fields(kind)}
    default = kind(**{name: value for name, value in program.defaults.items() if name in names})
    return cli.parse_plain(kind, flags, prog, default), program
