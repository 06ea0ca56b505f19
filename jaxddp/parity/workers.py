"""Processes in which both sides of a check run."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from jaxddp.config.options import Platform
from jaxddp.errors import InputError
from jaxddp.parity.jax_side.child import JaxChild
from jaxddp.parity.processes import Child, ChildError, Watch
from jaxddp.parity.torch_side.pool import TorchPool


class Workers:
    """Processes in which both sides run, started at first use; a context manager that ends them all.

    Args:
        world_size: largest world size of any job.
        platform: jax's platform, "cpu" or "gpu"; None: GPUs if there are enough, else the CPU.
        timeout: seconds without a message after which a process counts as hanging.
        torch_platform: "cpu" or "gpu", of torch's ranks.
        processes: number of processes of jax's side, which divides `world_size`; several are on the CPU.

    Attributes:
        watch: is called while processes work; see `jaxddp.parity.processes.answers`.

    Raises:
        InputError: several processes are to use GPUs.
    """

    watch: Watch

    def __init__(
        self,
        world_size: int,
        platform: Platform | None = None,
        timeout: float = 300.0,
        torch_platform: Platform = "cpu",
        processes: int = 1,
    ):
        self._world_size, self._timeout, self._processes = world_size, timeout, processes
        if processes > 1 and platform == "gpu":
            raise InputError(f"--num-processes {processes}: is for CPU devices; --platform must not be gpu")
        self._platform, self._torch_platform = platform if processes == 1 else "cpu", torch_platform
        self._torch: TorchPool | None = None
        self._more_torch: TorchPool | None = None
        self._jax: JaxChild | None = None
        self.watch = lambda children: None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(patience=10.0 if error is None else 0.0)

    def end(self, patience: float = 0.0) -> None:
        """Wait `patience` seconds for the processes to end, then kill them; the next job starts new ones."""
        until = time.monotonic() + patience
        if self._jax is not None:
            self._jax.end(patience)
        self._jax = None
        self.end_torch(max(0.0, until - time.monotonic()))

    def end_torch(self, patience: float = 0.0) -> None:
        """End only torch's ranks; they hold 0.2 GiB each after a job."""
        for torch in (self._torch, self._more_torch):
            if torch is not None:
                torch.end(patience)
        self._torch = self._more_torch = None

    def end_after(self, error: ChildError) -> None:
        """End jax's process if it died or hangs, so that the next job starts a new one; keep one that raised.

        Several processes of jax end together, because the others may wait for the one that raised.
        """
        if error.child.startswith("jax") and (self._processes > 1 or not error.trace) and self._jax is not None:
            self._jax.end()
            self._jax = None

    @property
    def torch(self) -> TorchPool:
        """Torch's ranks, restarted if they were ended."""
        self._start_jax()  # side by side
        if self._torch is None or not self._torch.alive:
            torch = TorchPool(self._world_size, self._timeout, self._torch_platform, self._watch_both)
            self._torch = torch.__enter__()
        return self._torch

    def torch_of(self, world_size: int) -> TorchPool:
        """Return ranks for so many replicas, further ones if there are fewer: a process group keeps its size."""
        if world_size <= self._world_size:
            return self.torch
        if self._more_torch is None or self._more_torch.size < world_size or not self._more_torch.alive:
            torch = TorchPool(world_size, self._timeout, self._torch_platform, self._watch_both)
            self._more_torch = torch.__enter__()
        return self._more_torch

    @property
    def jax(self) -> JaxChild:
        """jax's process, restarted if it was ended."""
        if self._jax is None and self._torch is None:
            self.torch  # noqa: B018  # side by side
        return self._start_jax()

    def _watch_both(self, ranks: Sequence[Child]) -> None:
        self.watch([*ranks, *([] if self._jax is None else self._jax.heard())])

    def _start_jax(self) -> JaxChild:
        if self._jax is None:
            sizes = self._world_size, self._platform, self._timeout, self._processes
            self._jax = JaxChild(*sizes, lambda at: self.watch(at))
        return self._jax
