"""The child process of a torch rank, which runs jobs. Imports no jax."""

import contextlib
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from jaxddp.config.options import Platform
from jaxddp.errors import InputError
from jaxddp.parity.processes import Tell, reported, telling
from jaxddp.parity.torch_side.side import Source, default_dtype
from torch_ref.distributed import CPU, World, process_group


class TorchJob(Protocol):
    """A job for ranks 0 .. world_size - 1 together."""

    @property
    def world_size(self) -> int:
        """Number of ranks that take part."""

    @property
    def source(self) -> Source:
        """Model or port whose code runs."""

    def run(self, world: World, tell: Tell) -> Any:
        """Do this rank's share and return the answer, which is sent to the parent.

        Args:
            world: the ranks that take part.
            tell: reports to the parent what the rank is doing.
        """


def rank_folder(folder: Path, rank: int) -> Path:
    """Return the folder of a rank's records."""
    return folder / f"rank{rank}"


def serve(rank: int, size: int, platform: Platform, store_file: str, connection: Connection) -> None:
    """Run jobs until None arrives; each reports its progress, then ("done", answer) or ("failed", why).

    With `platform` "gpu", the ranks share the GPUs, by NCCL if each has its own, else by Gloo.
    """
    torch.set_num_threads(1)  # the ranks share the machine's cores
    with reported(connection, "--torch-platform"):
        device = device_of(rank, platform)
    connected_by = device if torch.cuda.device_count() >= size else CPU
    with process_group(rank, size, connected_by, dist.FileStore(store_file, size)):
        torch.backends.cudnn.allow_tf32 = False  # torch's default for convolutions rounds to 10 bits
        # `new_group` is collective: every process must call it for every group, including those outside the group.
        groups = {count: dist.new_group(list(range(count))) for count in range(1, size + 1)}
        connection.send(("done", None))
        while (job := connection.recv()) is not None:
            world = World(rank, job.world_size, device, groups[job.world_size])
            # Constants that a port's loss makes get the run's dtype, also in the threads of a replay.
            dtype = getattr(job, "dtype", "float64") if hasattr(job.source, "port") else "float32"
            with reported(connection, job.source.name), default_dtype(dtype), optimizers_in_float32():
                connection.send(("done", job.run(world, telling(connection))))


@contextlib.contextmanager
def optimizers_in_float32() -> Iterator[None]:
    """Let torch's optimizers make their numbers, as NAdam's product, in torch's default dtype whatever the run's is.

    So they do in a user's float64 run, and so do jaxddp's.
    """
    before: list[torch.dtype] = []

    def begin(*_: Any) -> None:
        before.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)

    def end(*_: Any) -> None:
        torch.set_default_dtype(before.pop())

    with hooked(register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)):
        yield


@contextlib.contextmanager
def hooked(*handles: RemovableHandle) -> Iterator[None]:
    """Remove hooks at the end of the `with` statement."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def device_of(rank: int, platform: Platform) -> torch.device:
    """Return the device of a rank; with `platform` "gpu", ranks take the GPUs in turn.

    Raises:
        InputError: there is no GPU.
    """
    if platform == "cpu":
        return CPU
    if not torch.cuda.is_available():
        raise InputError("--torch-platform gpu: torch finds no GPU here; use --torch-platform cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())
