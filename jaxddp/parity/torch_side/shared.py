"""Share memory among a large model's ranks: one copy of parameters and optimizer state, in files. Imports no jax.

The ranks of DistributedDataParallel hold equal parameters and make equal updates. So only rank 0 makes them, and the
others see them in the file that all ranks map. The system keeps a mapped file in memory while there is room.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from jaxddp.parity.excerpts import LARGE
from jaxddp.parity.lazy_arrays import Arrays, Renamed
from torch_ref.distributed import CPU, World


class OnDisk(TorchFunctionMode):
    """Context manager in which large tensors of zeros, and large copies, lie in files.

    Args:
        folder: existing folder; the files have no names in it and vanish with their tensors.

    >>> with OnDisk(Path("/tmp")):
    ...     zeros = torch.zeros_like(torch.ones(2, 2**17))
    >>> zeros.add_(1).sum()
    tensor(262144.)
    """

    def __init__(self, folder: Path):
        super().__init__()
        self._folder = folder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch; put large results of zeros or copies in a file."""
        copies = func in (torch.clone, Tensor.clone)
        if not (copies or func is torch.zeros_like) or args[0].numel() <= LARGE or args[0].device != CPU:
            return func(*args, **(kwargs or {}))
        dtype = (kwargs or {}).get("dtype") or args[0].dtype
        with NamedTemporaryFile(dir=self._folder) as file:
            made = _mapped(Path(file.name), args[0].numel(), dtype).view(args[0].shape)
        return made.copy_(args[0]) if copies else made


class SharedParameters:
    """Trainable parameters of a large model, in one copy for all ranks.

    Args:
        model: this rank's copy of the module; all ranks construct their copies at the same time.
        world: the ranks, on the CPU of one machine.
        folder: existing folder for the files.

    Attributes:
        names: names of the parameters.
    """

    def __init__(self, model: nn.Module, world: World, folder: Path):
        learning = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.names = frozenset(learning)
        self._parameters, self._world, self._folder = [*learning.values()], world, folder
        path, sizes = folder / "parameters", [parameter.numel() for parameter in self._parameters]
        if world.rank == 0:
            _mapped(path, sum(sizes), self._parameters[0].dtype)
        self.wait()
        parts = _mapped(path, sum(sizes), self._parameters[0].dtype).split(sizes)
        for parameter, part in zip(self._parameters, parts, strict=True):
            if world.rank == 0:
                part.copy_(parameter.detach().reshape(-1))
            parameter.data = part.view(parameter.shape)
        self.wait()
        if world.rank == 0:
            path.unlink()

    def wait(self) -> None:
        """Wait until all ranks are here."""
        if self._world.world_size > 1:
            dist.barrier(group=self._world.group)

    def mine(self, state: Arrays) -> Arrays:
        """Return the part of a state that this rank has to load: rank 0 loads the shared parameters for all."""
        return Renamed(state, {name: name for name in state if self._world.rank == 0 or name not in self.names})

    def update(self, optimizer: Optimizer) -> None:
        """Take the optimizer's step on rank 0; on the others the optimizer has no gradients and does nothing."""
        self.wait()  # a slower rank may still compute its gradients from the parameters
        if self._world.rank > 0:
            for parameter in self._parameters:
                parameter.grad = None
        with self.on_disk():
            optimizer.step()

    def on_disk(self) -> OnDisk:
        """Return a context in which large copies lie in files."""
        return OnDisk(self._folder)


def may_share(model: nn.Module, optimizer: Optimizer, world: World) -> bool:
    """Return whether rank 0 can make all ranks' updates: on one CPU, with an optimizer of torch.optim."""
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    return world.device == CPU and len(kinds) == 1 and type(optimizer).__module__.startswith("torch.optim.")


def _mapped(path: Path, size: int, dtype: torch.dtype) -> Tensor:
    """Map a file as a tensor; a new file holds zeros."""
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype)
