"""Fields of a port, and facts about its training loop."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxddp.config import TrainConfig
from jaxddp.config.choices import LOSS_NORMALIZATIONS, OPTIMIZERS
from jaxddp.config.ranges import check_range
from jaxddp.errors import InputError, check_name

if TYPE_CHECKING:
    import optax
    import torch

Arrays = Mapping[str, np.ndarray]
Side = Literal["torch", "flax"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a training loop by which its stages are judged; fields without a line here are as in `Port`.

    Attributes:
        clip_grad_norm: largest norm after clipping on torch's side.
        own_step, own_start: the port has a `flax_step`, a `flax_start`.
        clips_inside: the optax chain does the clipping.
        casts: dtypes that torch's loss casts to.
        no_twin: constants that are not compared.
    """

    accumulation_steps: int = 1
    clip_grad_norm: float | None = None
    loss_normalization: str = "ddp"
    steps_per_epoch: int | None = None
    restore_at: int | None = None
    own_step: bool = False
    own_start: bool = False
    clips_inside: bool = False
    casts: tuple[str, ...] = ()
    no_twin: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Port:
    """A training loop in both frameworks.

    Attributes:
        torch_model: makes the torch module.
        flax_model: makes its flax twin, of flax.nnx or flax.linen.
        torch_loss: (module, batch of tensors) -> the loss: a scalar, the batch's mean; or one value per element;
            or a pair (one value per element, their weights), or (mean, anything), of which the mean is taken.
        flax_loss: (module, batch of arrays) -> the same.
        batch: (step, rank) -> one replica's examples of one optimizer step, arrays by name, for both frameworks.
        torch_batch, flax_batch: given instead of `batch` if each framework has its own loader; examples are matched
            by their values (or by an entry "ids", if both have one).
        optimizer: for both sides, a name in `jaxddp.config.choices.OPTIMIZERS`, or a `TrainConfig` with options and
            a schedule; None: each side has its own.
        torch_optimizer: parameters -> a torch optimizer.
        torch_scheduler: optimizer -> a scheduler that is stepped after every optimizer step.
        flax_optimizer: an optax transformation.
        accumulation_steps: number of micro-batches that each batch is cut into, along the first axis.
        clip_grad_norm: largest global norm of the averaged gradient, on both sides; None: no clipping.
        torch_clip_grad_norm: the same on torch's side only, for an optax chain that clips.
        loss_normalization: "ddp", the mean of the replicas' means, or "global": the sum of all weighted losses over
            the sum of all weights.
        find_unused_parameters: torch DDP's; for losses that do not reach every parameter.
        steps_per_epoch: optimizer steps per epoch; with it, mistakes of a sampler can be named.
        flax_step: replica step that replaces jaxddp's: (loss, optimizer, state, batch) -> (state, stages).
            `loss(params, buffers, batch)` is flax_loss as (mean, new buffers); `state` is a
            `jaxddp.state.TrainState` of the model's own trees; the axis is called "replica"; with accumulation_steps
            A > 1 the arrays of the batch are (A, B / A, ...). `stages` may show "local_loss", "local_gradients",
            "gradients" and "clipped_gradients"; a stage that is not shown is judged by its effect on the update.
        flax_start: (params, rank) -> the parameters that a replica starts from; None: all start from the same.
        flax_restore: state -> state: the port's saving and loading, which must change nothing.
        restore_at: number of steps after which `flax_restore` is called.
        names: flax prefixes to torch prefixes, where the two differ.
        transpose_kernel: see `jaxddp.parity.convert.Converter`.
        no_twin: names of constants, such as causal masks, that one of the two models holds as a buffer.

    Raises:
        InputError: a field has the wrong kind or value, or contradicts another.
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
    no_twin: Collection[str] = ()

    def __post_init__(self) -> None:
        self._check_functions()
        if isinstance(self.optimizer, str):
            check_name("optimizer", self.optimizer, OPTIMIZERS)
        pair = (self.torch_optimizer, self.flax_optimizer)
        if (self.optimizer is None) == (pair == (None, None)) or (self.optimizer is None and None in pair):
            raise InputError("optimizer: give either one for both sides, or torch_optimizer and flax_optimizer")
        if self.optimizer is not None and self.torch_scheduler is not None:
            raise InputError("torch_scheduler: needs torch_optimizer; `optimizer` has its own schedule")
        check_range("accumulation_steps", self.accumulation_steps)
        check_range("clip_grad_norm", self.clip_grad_norm)
        check_range("clip_grad_norm", self.torch_clip_grad_norm, f"torch_clip_grad_norm {self.torch_clip_grad_norm}")
        if None not in (self.clip_grad_norm, self.torch_clip_grad_norm):
            raise InputError("torch_clip_grad_norm: must not be given beside clip_grad_norm, which clips on both sides")
        check_name("loss_normalization", self.loss_normalization, LOSS_NORMALIZATIONS)
        if (self.flax_restore is None) != (self.restore_at is None):
            raise InputError("restore_at: must be given with flax_restore, as the number of steps before its call")

    def _check_functions(self) -> None:
        required = ("torch_model", "flax_model", "torch_loss", "flax_loss")
        optional = ("batch", "torch_batch", "flax_batch", "torch_optimizer", "torch_scheduler")
        for name in (*required, *optional, "flax_step", "flax_start", "flax_restore"):
            value = getattr(self, name)
            if not callable(value) and (value is not None or name in required):
                raise InputError(f"{name}: must be a function, and is {type(value).__name__}")
        if self.flax_optimizer is not None and not hasattr(self.flax_optimizer, "update"):
            kind = type(self.flax_optimizer).__name__
            raise InputError(f"flax_optimizer: must be an optax transformation, and is {kind}")
        if (self.batch is None) == (None in (self.torch_batch, self.flax_batch)):
            raise InputError("batch: give either one for both sides, or torch_batch and flax_batch")

    @property
    def facts(self) -> Facts:
        """Facts by which the port's stages are judged."""
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
            no_twin=tuple(self.no_twin),
        )

    @property
    def optimizer_config(self) -> TrainConfig | None:
        """Optimizer that both sides share, with its options and schedule; None if each side has its own."""
        return TrainConfig(optimizer=self.optimizer) if isinstance(self.optimizer, str) else self.optimizer

    def micro_batches(self, step: int, rank: int, side: Side = "torch") -> list[dict[str, np.ndarray]]:
        """Return one replica's examples of one step in `accumulation_steps` pieces of equal size.

        Args:
            step, rank: counted from 0.
            side: the side to ask, where each has its own loader.

        Raises:
            InputError: the batch is not a dictionary of numeric arrays of equal length, or cannot be cut evenly.
        """
        name = "batch" if self.batch is not None else f"{side}_batch"
        call = f"{name}({step}, {rank})"
        batch = getattr(self, name)(step, rank)
        if not isinstance(batch, Mapping) or not batch:
            raise InputError(f"{call}: must be a dictionary of arrays, and is {type(batch).__name__}")
        arrays = {key: np.asarray(value) for key, value in batch.items()}
        sizes = {key: len(array) if array.ndim else 0 for key, array in arrays.items()}
        if len(set(sizes.values())) != 1 or 0 in sizes.values():
            raise InputError(f"{call}: its arrays must have the same length, at least 1, and have {sizes}")
        if odd := [f"{key} of {array.dtype}" for key, array in arrays.items() if array.dtype.kind not in "fiub"]:
            raise InputError(f"{call}: must hold numbers, and has {', '.join(odd)}")
        size, pieces = next(iter(sizes.values())), self.accumulation_steps
        if size % pieces:
            raise InputError(f"accumulation_steps {pieces}: must divide the {size} examples of {call}")
        parts = {key: np.split(array, pieces) for key, array in arrays.items()}
        return [{key: of_key[piece] for key, of_key in parts.items()} for piece in range(pieces)]
