"""Configuration of torch_ref: that of jaxddp, and the strategy."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_type_hints

from jaxddp.config import TrainConfig, TrainerConfig
from jaxddp.config.checks import typed
from jaxddp.config.choices import POWER_SGD
from jaxddp.config.kinds import choices_of
from jaxddp.errors import InputError, check_name

# Options without effect here: one checkpoint is kept, and torch waits for its ranks as long as it chooses.
ONLY_JAXDDP = ("steps_per_dispatch", "stall_timeout", "join_timeout", "keep_checkpoints")
PROCESSES = ("coordinator", "num_processes", "process_id")
STRATEGIES_OF = {
    "comm_hook": ("ddp",),
    "detect_anomaly": ("ddp",),
    "start_local_sgd_iter": ("ddp",),
    "shard_optimizer": ("ddp", "manual"),
    "join": ("ddp", "single"),
}


@dataclass(frozen=True)
class Strategy:
    """Form of data parallelism in torch."""

    strategy: Literal["ddp", "manual", "single"] = "ddp"
    """Torch's DDP, gradients averaged by hand, or one process on the whole batch."""


@dataclass(frozen=True)
class TorchTrainerConfig(Strategy, TrainerConfig):
    """Train with PyTorch DDP: the reference that jaxddp is compared with.

    The flags are those of jaxddp.train that torch can follow, and --strategy. Under torchrun, its processes are the
    replicas. --traceback shows where in the code an error was raised.
    """

    LEFT_OUT: ClassVar[tuple[str, ...]] = (*ONLY_JAXDDP, *PROCESSES)
    """Flags of jaxddp.train without effect here; a program may set them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("--strategy", self.strategy, choices_of(get_type_hints(Strategy)["strategy"]))
        for name in PROCESSES:
            if getattr(self, name) is not None:
                raise InputError(f"{typed(name, getattr(self, name))}: only for jaxddp.train; start torchrun instead")
        for name in ONLY_JAXDDP:
            if getattr(self, name) != getattr(TrainerConfig, name):
                raise InputError(f"{typed(name, getattr(self, name))}: only for jaxddp.train; leave it out")
        if self.join and self.evaluation_period.unit == "steps":
            raise InputError(
                f"--join --evaluate-every {self.evaluate_every}: ranks without examples take no part in a test within "
                "an epoch; must be a number of epochs, or use jaxddp.train"
            )
        if self.checkpoint_period.unit != "epochs":
            raise InputError(
                f"--checkpoint-every {self.checkpoint_every}: torch_ref saves between epochs; "
                "must be a number of epochs, or use jaxddp.train"
            )
        for name in ("on_nan", "on_drift"):
            if getattr(self, name) != "stop":
                raise InputError(f"{typed(name, getattr(self, name))}: torch_ref can only stop; use jaxddp.train")
        for name, strategies in STRATEGIES_OF.items():
            if getattr(self, name) != getattr(TrainerConfig, name) and self.strategy not in strategies:
                only = f"only for --strategy {' or '.join(strategies)}, not {self.strategy}"
                raise InputError(f"{typed(name, getattr(self, name))}: {only}")
        if self.resume is not None and self.comm_hook in POWER_SGD:
            raise InputError(
                f"--resume {self.resume}: the state of --comm-hook {self.comm_hook} is laid out as DDP's buckets, "
                "which differ in a new process; jaxddp.train can resume it"
            )
        if self.join:
            self._check_join()

    def _check_join(self) -> None:
        if self.strategy == "ddp" and self.loss_normalization == "global":
            raise InputError(
                "--join --loss-normalization global: ranks without examples take no part in the count; "
                "--strategy single computes the same, with one process on the whole batch"
            )
        if self.amp == "fp16":
            raise InputError("--join --amp fp16: torch's scaler falls behind on ranks without examples; use bf16")
        if self.shard_optimizer:
            raise InputError(
                "--join --shard-optimizer: torch's shards fall behind on ranks without examples; leave one flag out"
            )
        if self.strategy == "ddp" and self.sync_batch_norm:
            raise InputError(
                "--join --sync-batch-norm: DDP's join does not cover SyncBatchNorm's messages; use --strategy single"
            )
        if self.comm_hook != "allreduce" and not self.divide_by_initial_world_size:
            raise InputError(
                f"--no-divide-by-initial-world-size: torch's hook for --comm-hook {self.comm_hook} always divides by it"
            )
        if self.strategy == "ddp" and (self.log_gradients or self.detect_anomaly):
            option = "--detect-anomaly" if self.detect_anomaly else "--log-gradients"
            raise InputError(f"--join {option}: ranks without examples report no gradients; use jaxddp.train")


@dataclass(frozen=True)
class TorchConfig(TorchTrainerConfig, TrainConfig):
    """Train with PyTorch DDP: the reference that jaxddp is compared with.

    PROGRAM.py, as the first argument, is your own model and data; --help after it shows its options too. Without it, a
    classifier of handwritten digits is trained. The flags are those of jaxddp.train that torch can follow, and
    --strategy. Under torchrun, its processes are the replicas. --traceback shows where in the code an error was raised.
    """
