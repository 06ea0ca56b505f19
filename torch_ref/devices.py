"""Devices of a run: local GPUs, or CPU processes; under torchrun, the processes that it started."""

import os

import torch

from jaxddp.config.choices import DEFAULT_CPU_DEVICES, MOST_CPU_DEVICES
from jaxddp.config.launcher import complete, number
from jaxddp.errors import InputError
from torch_ref.config import TorchTrainerConfig

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # of torchrun


def under_torchrun() -> bool:
    """Return whether torchrun, or a launcher like it, started this process as one of several ranks.

    Raises:
        InputError: some of torchrun's variables are missing or empty, or one is not a number or too large.
    """
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & os.environ.keys():
        return False
    values = complete("torchrun", os.environ, VARIABLES)
    assert values is not None, "one is set"
    rank, size, *_ = [number(*pair) for pair in zip(VARIABLES, values, strict=True) if pair[0] != "MASTER_ADDR"]
    if rank >= size:
        raise InputError(f"RANK {rank}: must be below WORLD_SIZE, which is {size}")
    return True


def num_replicas(config: TorchTrainerConfig) -> int:
    """Return the number of replicas that share each global batch; with --strategy single, one process runs them all.

    >>> num_replicas(TorchTrainerConfig(devices=4, platform="cpu"))
    4
    """
    if under_torchrun():
        return int(os.environ["WORLD_SIZE"])
    if config.devices is not None:
        return config.devices
    return torch.cuda.device_count() if _on_gpu(config) else DEFAULT_CPU_DEVICES


def local_device(config: TorchTrainerConfig, local_rank: int) -> torch.device:
    """Return the device of this machine's replica number `local_rank`.

    >>> local_device(TorchTrainerConfig(platform="cpu"), local_rank=1)
    device(type='cpu')
    """
    return torch.device("cuda", local_rank) if _on_gpu(config) else torch.device("cpu")


def check_devices(config: TorchTrainerConfig) -> None:
    """Check, before any process starts, that the run fits the machine and torch.

    Raises:
        InputError: too few GPUs, a batch that the replicas do not divide, flags that contradict torchrun, or
            synchronised BatchNorm on CPU processes.
    """
    replicas = num_replicas(config)
    config.per_replica_batch_size(replicas)
    if config.platform == "gpu" and not torch.cuda.is_available():
        raise InputError("--platform gpu: torch finds no GPU here; use --platform cpu")
    if under_torchrun():
        _check_torchrun(config, replicas)
    elif _on_gpu(config) and config.strategy != "single" and replicas > torch.cuda.device_count():
        supply = f"there are {torch.cuda.device_count()} local GPUs"
        raise InputError(f"--devices {replicas}: {supply}; --platform cpu starts up to {MOST_CPU_DEVICES} processes")
    elif not _on_gpu(config) and replicas > MOST_CPU_DEVICES:
        raise InputError(f"--devices {replicas}: must be at most {MOST_CPU_DEVICES} on the CPU")
    if config.sync_batch_norm and config.strategy != "single" and replicas > 1 and not _on_gpu(config):
        raise InputError(
            "--sync-batch-norm: torch's SyncBatchNorm runs on GPUs only; on CPU --strategy single computes the "
            "same, with one process on the whole batch"
        )


def _check_torchrun(config: TorchTrainerConfig, replicas: int) -> None:
    if config.resume is None and config.devices not in (None, replicas):  # --resume restores the number
        raise InputError(f"--devices {config.devices}: torchrun started {replicas} processes; leave the flag out")
    if config.strategy == "single" and replicas > 1:
        raise InputError(f"--strategy single: needs one process, torchrun started {replicas}; run without torchrun")


def _on_gpu(config: TorchTrainerConfig) -> bool:
    return config.platform != "cpu" and torch.cuda.is_available()
