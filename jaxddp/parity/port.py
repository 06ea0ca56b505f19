"""What a user brings: a PyTorch training loop and its translation into JAX.

A port is a file of plain Python whose top-level names are the fields of `Port`:

    def torch_model(): return TorchNet()
    def flax_model(): return FlaxNet(nnx.Rngs(0))
    def torch_loss(model, batch): return F.cross_entropy(model(batch["x"]), batch["y"])
    def flax_loss(model, batch): return softmax_cross_entropy(model(batch["x"]), batch["y"]).mean()
    def torch_optimizer(parameters): return torch.optim.AdamW(parameters, lr=1e-3)
    flax_optimizer = optax.adamw(1e-3, weight_decay=1e-2)
    def batch(step, rank): return {"x": ..., "y": ...}

This module imports neither framework: a rank of torch needs no jax, but for what the file imports.
"""

import importlib.util
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxddp.config import OPTIMIZERS, TrainConfig
from jaxddp.errors import InputError, check_name

if TYPE_CHECKING:
    import optax
    import torch

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Port:
    """A training loop in both frameworks.

    Attributes:
        torch_model: makes the torch module.
        flax_model: makes its twin, of flax.nnx or flax.linen.
        torch_loss: (module, batch of tensors) -> the loss: a scalar, the batch's mean, or one per element.
        flax_loss: (module, batch of arrays) -> the same.
        batch: (step, rank) -> one replica's examples of one optimizer step, arrays by name.
        optimizer: one for both: a name of `jaxddp.config.OPTIMIZERS`, or a `TrainConfig` with options
            and a schedule. Or else:
        torch_optimizer: parameters -> a torch optimizer.
        torch_scheduler: optimizer -> a scheduler that is stepped after every optimizer step.
        flax_optimizer: an optax transformation.
        accumulation_steps: micro-batches that each batch is cut into, along the first axis.
        clip_grad_norm: clip the averaged gradient to this global norm; None: no clipping.
        names: flax prefixes to torch prefixes, where the two differ.
        transpose_kernel: see `jaxddp.parity.convert.Converter`.
    """

    torch_model: Callable[[], "torch.nn.Module"]
    flax_model: Callable[[], Any]
    torch_loss: Callable[["torch.nn.Module", Mapping[str, "torch.Tensor"]], "torch.Tensor"]
    flax_loss: Callable[[Any, Mapping[str, Any]], Any]
    batch: Callable[[int, int], Arrays]
    optimizer: str | TrainConfig | None = None
    torch_optimizer: Callable[[Iterable[Any]], "torch.optim.Optimizer"] | None = None
    torch_scheduler: Callable[["torch.optim.Optimizer"], Any] | None = None
    flax_optimizer: "optax.GradientTransformation | None" = None
    accumulation_steps: int = 1
    clip_grad_norm: float | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    transpose_kernel: Collection[str] = ()

    def __post_init__(self) -> None:
        for name in ("torch_model", "flax_model", "torch_loss", "flax_loss", "batch"):
            if not callable(getattr(self, name)):
                raise InputError(f"{name}: must be a function, and is {type(getattr(self, name)).__name__}")
        if isinstance(self.optimizer, str):
            check_name("optimizer", self.optimizer, OPTIMIZERS)
        own = (self.torch_optimizer, self.flax_optimizer)
        if (self.optimizer is None) == (own == (None, None)) or (self.optimizer is None and None in own):
            raise InputError("optimizer: give either one for both, or torch_optimizer and flax_optimizer")
        if self.optimizer is not None and self.torch_scheduler is not None:
            raise InputError("torch_scheduler: goes with torch_optimizer; one `optimizer` brings its own schedule")
        if self.accumulation_steps < 1:
            raise InputError(f"accumulation_steps {self.accumulation_steps}: must be at least 1")
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise InputError(f"clip_grad_norm {self.clip_grad_norm}: must be above 0")

    @property
    def optimizer_config(self) -> TrainConfig | None:
        """The optimizer that both share, with its options and its schedule; None if each has its own."""
        return TrainConfig(optimizer=self.optimizer) if isinstance(self.optimizer, str) else self.optimizer

    def micro_batches(self, step: int, rank: int) -> list[dict[str, np.ndarray]]:
        """One replica's examples of one step, in pieces of equal size.

        Raises:
            InputError: `batch` returns something else than arrays of one length, or they cannot be cut up.
        """
        found = self.batch(step, rank)
        if not isinstance(found, Mapping) or not found:
            raise InputError(f"batch({step}, {rank}): must be a dictionary of arrays, and is {type(found).__name__}")
        arrays = {name: np.asarray(value) for name, value in found.items()}
        sizes = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
        if len(set(sizes.values())) != 1 or 0 in sizes.values():
            raise InputError(f"batch({step}, {rank}): its arrays must be of one length, and have {sizes}")
        size, pieces = next(iter(sizes.values())), self.accumulation_steps
        if size % pieces:
            raise InputError(f"accumulation_steps {pieces}: do not divide the {size} examples of batch({step}, {rank})")
        cut = {name: np.split(array, pieces) for name, array in arrays.items()}
        return [{name: parts[piece] for name, parts in cut.items()} for piece in range(pieces)]


def load_port(path: str | Path) -> Port:
    """Run a port file and take its fields.

    Its folder is on the import path while it runs, so that it can import what lies beside it.

    Raises:
        InputError: the file is missing, fails, lacks a field, or has one of no use.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(f"port_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: must be a Python file, *.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.parent.absolute()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{path}: line {_line(error, path)}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent.absolute()))
    found = {f.name: getattr(module, f.name) for f in fields(Port) if hasattr(module, f.name)}
    missing = [f.name for f in fields(Port) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in missing if name not in found]:
        raise InputError(f"{path}: has no {', '.join(missing)}")
    try:
        return Port(**found)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _line(error: Exception, path: Path) -> int | None:
    """The line of the file that failed, or that called what did."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return lines[-1] if lines else None
