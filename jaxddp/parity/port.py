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

import contextlib
import difflib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxddp.config import TrainConfig
from jaxddp.config.choices import LOSS_NORMALIZATIONS, OPTIMIZERS
from jaxddp.errors import InputError, check_name

if TYPE_CHECKING:
    import optax
    import torch

LONG, ALIKE = 8, 0.85  # length of a name, and likeness of another to it, that is no chance
Arrays = Mapping[str, np.ndarray]
Side = Literal["torch", "flax"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is to be known of a training loop to judge what it did; see `Port` for the fields.

    Attributes:
        clip_grad_norm: torch's.
        own_step, own_start: whether there is a `flax_step`, a `flax_start`.
        clips_inside: whether it is the optax chain that clips.
    """

    accumulation_steps: int = 1
    clip_grad_norm: float | None = None
    loss_normalization: str = "ddp"
    steps_per_epoch: int | None = None
    restore_at: int | None = None
    own_step: bool = False
    own_start: bool = False
    clips_inside: bool = False


@dataclass(frozen=True, kw_only=True)
class Port:
    """A training loop in both frameworks.

    Attributes:
        torch_model: makes the torch module.
        flax_model: makes its twin, of flax.nnx or flax.linen.
        torch_loss: (module, batch of tensors) -> the loss: a scalar, the batch's mean; or one per element;
            or a pair (one per element, weights).
        flax_loss: (module, batch of arrays) -> the same.
        batch: (step, rank) -> one replica's examples of one optimizer step, arrays by name. Or else:
        torch_batch, flax_batch: the same of either framework, where each has its own loader; examples
            are recognised by their values (or by an entry "ids", if both have one).
        optimizer: one for both: a name of `jaxddp.config.OPTIMIZERS`, or a `TrainConfig` with options
            and a schedule. Or else:
        torch_optimizer: parameters -> a torch optimizer.
        torch_scheduler: optimizer -> a scheduler that is stepped after every optimizer step.
        flax_optimizer: an optax transformation.
        accumulation_steps: micro-batches that each batch is cut into, along the first axis.
        clip_grad_norm: clip the averaged gradient to this global norm, on both sides; None: no clipping.
        torch_clip_grad_norm: on torch's side alone, for an optax chain that clips by itself.
        loss_normalization: "ddp", the mean of the replicas' means, or "global": the sum of all weighted
            losses over the sum of all weights.
        find_unused_parameters: torch DDP's; for losses that do not reach every parameter.
        steps_per_epoch: lets a difference in sampling be named.
        flax_step: the port's own replica step, in place of jaxddp's: (loss, optimizer, state, batch) ->
            (state, stages). `loss(params, buffers, batch)` is flax_loss as (mean, new buffers);
            `state` is a `jaxddp.state.TrainState`; the axis is called "replica"; with
            accumulation_steps A > 1 the arrays of the batch are (A, B / A, ...). `stages` may show
            "local_loss", "local_gradients", "gradients" and "clipped_gradients"; what it does not
            show is judged by what comes of it.
        flax_start: (params, rank) -> the parameters that a replica starts from; by default all
            start from the same.
        flax_restore: state -> state: the port's saving and loading, which must change nothing.
        restore_at: after how many steps `flax_restore` is called.
        names: flax prefixes to torch prefixes, where the two differ.
        transpose_kernel: see `jaxddp.parity.convert.Converter`.
    """

    torch_model: Callable[[], "torch.nn.Module"]
    flax_model: Callable[[], Any]
    torch_loss: Callable[["torch.nn.Module", Mapping[str, "torch.Tensor"]], Any]
    flax_loss: Callable[[Any, Mapping[str, Any]], Any]
    batch: Callable[[int, int], Arrays] | None = None
    torch_batch: Callable[[int, int], Arrays] | None = None
    flax_batch: Callable[[int, int], Arrays] | None = None
    optimizer: str | TrainConfig | None = None
    torch_optimizer: Callable[[Iterable[Any]], "torch.optim.Optimizer"] | None = None
    torch_scheduler: Callable[["torch.optim.Optimizer"], Any] | None = None
    flax_optimizer: "optax.GradientTransformation | None" = None
    accumulation_steps: int = 1
    clip_grad_norm: float | None = None
    torch_clip_grad_norm: float | None = None
    loss_normalization: str = "ddp"
    find_unused_parameters: bool = False
    steps_per_epoch: int | None = None
    flax_step: Callable[[Any, Any, Any, Mapping[str, Any]], tuple[Any, Mapping[str, Any]]] | None = None
    flax_start: Callable[[Mapping[str, Any], int], Mapping[str, Any]] | None = None
    flax_restore: Callable[[Any], Any] | None = None
    restore_at: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    transpose_kernel: Collection[str] = ()

    def __post_init__(self) -> None:
        self._check_functions()
        if isinstance(self.optimizer, str):
            check_name("optimizer", self.optimizer, OPTIMIZERS)
        own = (self.torch_optimizer, self.flax_optimizer)
        if (self.optimizer is None) == (own == (None, None)) or (self.optimizer is None and None in own):
            raise InputError("optimizer: give either one for both, or torch_optimizer and flax_optimizer")
        if self.optimizer is not None and self.torch_scheduler is not None:
            raise InputError("torch_scheduler: goes with torch_optimizer; one `optimizer` brings its own schedule")
        if self.accumulation_steps < 1:
            raise InputError(f"accumulation_steps {self.accumulation_steps}: must be at least 1")
        for name in ("clip_grad_norm", "torch_clip_grad_norm"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise InputError(f"{name} {getattr(self, name)}: must be above 0")
        if None not in (self.clip_grad_norm, self.torch_clip_grad_norm):
            raise InputError("torch_clip_grad_norm: clip_grad_norm clips on both sides already")
        check_name("loss_normalization", self.loss_normalization, LOSS_NORMALIZATIONS)
        if (self.flax_restore is None) != (self.restore_at is None):
            raise InputError("restore_at: goes with flax_restore, and says after how many steps it is called")

    def _check_functions(self) -> None:
        needed = ("torch_model", "flax_model", "torch_loss", "flax_loss")
        optional = ("batch", "torch_batch", "flax_batch", "torch_optimizer", "torch_scheduler")
        for name in (*needed, *optional, "flax_step", "flax_start", "flax_restore"):
            value = getattr(self, name)
            if not callable(value) and (value is not None or name in needed):
                raise InputError(f"{name}: must be a function, and is {type(value).__name__}")
        if self.flax_optimizer is not None and not hasattr(self.flax_optimizer, "update"):
            kind = type(self.flax_optimizer).__name__
            raise InputError(f"flax_optimizer: must be an optax transformation, and is {kind}")
        if (self.batch is None) == (None in (self.torch_batch, self.flax_batch)):
            raise InputError("batch: give either one for both, or torch_batch and flax_batch")

    @property
    def facts(self) -> Facts:
        """What is to be known of it to judge what it did."""
        inside = self.torch_clip_grad_norm is not None
        return Facts(
            accumulation_steps=self.accumulation_steps,
            clip_grad_norm=self.torch_clip_grad_norm if inside else self.clip_grad_norm,
            loss_normalization=self.loss_normalization,
            steps_per_epoch=self.steps_per_epoch,
            restore_at=self.restore_at,
            own_step=self.flax_step is not None,
            own_start=self.flax_start is not None,
            clips_inside=inside,
        )

    @property
    def optimizer_config(self) -> TrainConfig | None:
        """The optimizer that both share, with its options and its schedule; None if each has its own."""
        return TrainConfig(optimizer=self.optimizer) if isinstance(self.optimizer, str) else self.optimizer

    def micro_batches(self, step: int, rank: int, side: Side = "torch") -> list[dict[str, np.ndarray]]:
        """One replica's examples of one step, in pieces of equal size.

        Args:
            step, rank: counted from 0.
            side: whose, where each has its own.

        Raises:
            InputError: they are something else than arrays of one length, or cannot be cut up.
        """
        name = "batch" if self.batch is not None else f"{side}_batch"
        called = f"{name}({step}, {rank})"
        found = getattr(self, name)(step, rank)
        if not isinstance(found, Mapping) or not found:
            raise InputError(f"{called}: must be a dictionary of arrays, and is {type(found).__name__}")
        arrays = {key: np.asarray(value) for key, value in found.items()}
        sizes = {key: len(array) if array.ndim else 0 for key, array in arrays.items()}
        if len(set(sizes.values())) != 1 or 0 in sizes.values():
            raise InputError(f"{called}: its arrays must be of one length, and have {sizes}")
        if odd := [f"{key} of {array.dtype}" for key, array in arrays.items() if array.dtype.kind not in "fiub"]:
            raise InputError(f"{called}: must hold numbers, and has {', '.join(odd)}")
        size, pieces = next(iter(sizes.values())), self.accumulation_steps
        if size % pieces:
            raise InputError(f"accumulation_steps {pieces}: do not divide the {size} examples of {called}")
        cut = {key: np.split(array, pieces) for key, array in arrays.items()}
        return [{key: parts[piece] for key, parts in cut.items()} for piece in range(pieces)]


def load_port(path: str | Path) -> Port:
    """Run a port file and take its fields.

    Its folder is on the import path from then on, so that it and its functions can import what lies beside it.

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
    if (folder := str(path.parent.absolute())) not in sys.path:
        sys.path.insert(0, folder)
    with errors_located(path):
        spec.loader.exec_module(module)
    found = {f.name: getattr(module, f.name) for f in fields(Port) if hasattr(module, f.name)}
    _check_spelling(path, module, found)
    missing = [f.name for f in fields(Port) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in missing if name not in found]:
        raise InputError(f"{path}: has no {', '.join(missing)}")
    try:
        return Port(**found)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _check_spelling(path: Path, module: ModuleType, found: Collection[str]) -> None:
    """A field that is misspelt would be left at its default, and the check be of something else."""
    lacking = [f.name for f in fields(Port) if f.name not in found and len(f.name) >= LONG]
    for name in vars(module):
        near = difflib.get_close_matches(name, lacking, n=1, cutoff=ALIKE)
        imported = getattr(getattr(module, name), "__module__", module.__name__) != module.__name__
        if near and name not in found and not name.startswith("_") and not imported:
            raise InputError(f"{path}: {name}: is no field of a port; did you mean {near[0]}?")


@contextlib.contextmanager
def errors_located(path: str | Path) -> Iterator[None]:
    """Whatever the port's own code raises becomes one line that says where in the file.

    Raises:
        InputError: in place of any other exception.
    """
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        line = _line(error, Path(path))
        where = f"{path}: " if line is None else f"{path}: line {line}: "
        raise InputError(f"{where}{type(error).__name__}: {_first_line(error)}") from error


def _line(error: BaseException, path: Path) -> int | None:
    """The line of the file that failed, or that called what did."""
    here = str(path.absolute())
    if isinstance(error, SyntaxError) and error.filename == here:
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == here]
    return lines[-1] if lines else None


def _first_line(error: BaseException) -> str:
    """What an error says, without the pages that frameworks add."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]) or "without a message"
