"""The processes in which both sides of a check run."""

from types import TracebackType
from typing import Self

from jaxddp.parity.flax_side.child import JaxChild
from jaxddp.parity.torch_side.pool import TorchPool


class Workers:
    """The processes in which both sides run; a context manager that ends them all.

    Args:
        world_size: the largest that will be asked for.
        platform: of jax; None: GPUs where there are any.
        timeout: seconds without a word after which a process counts as hanging.
    """

    def __init__(self, world_size: int, platform: str | None = None, timeout: float = 300.0):
        self._world_size, self._platform, self._timeout = world_size, platform, timeout
        self._torch: TorchPool | None = None
        self._jax: JaxChild | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        patience = 10.0 if error is None else 0.0
        if self._jax is not None:
            self._jax.end(patience)
        if self._torch is not None:
            self._torch.__exit__(kind, error, trace)

    def end_jax(self) -> None:
        """Make an end of jax's process, which may hang or be dead; the next job gets a new one."""
        if self._jax is not None:
            self._jax.end()
            self._jax = None

    @property
    def torch(self) -> TorchPool:
        """Torch's ranks; new ones if the last were ended."""
        if self._torch is None or not self._torch.alive:
            self._start_jax()  # which takes seconds, as torch does
            self._torch = TorchPool(self._world_size, self._timeout).__enter__()
        return self._torch

    @property
    def jax(self) -> JaxChild:
        """jax's process; a new one if the last was ended."""
        return self._start_jax()

    def _start_jax(self) -> JaxChild:
        if self._jax is None:
            self._jax = JaxChild(self._world_size, self._platform, self._timeout)
        return self._jax
