"""Fields of a port, and facts about its training loop."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from jaxddp.config import TrainerConfig
from jaxddp.config.choices import LOSS_NORMALIZATIONS, OPTIMIZERS
from jaxddp.config.ranges import check_range
from jaxddp.data.batches import of_batches, to_arrays
from jaxddp.errors import InputError, check_name
from jaxddp.parity.coverage import ASPECTS, DECISIVE, TRIALS
from jaxddp.parity.port.rules import Names, check_names

if TYPE_CHECKING:
    import optax
    import torch

Arrays = Mapping[str, np.ndarray]
Side = Literal["torch", "jax"]
INTENDED = sorted({*ASPECTS, *TRIALS} - {*DECISIVE})  # what a port may mean to differ in
EVALUATION = ("predict", "metrics", "torch_metrics", "jax_metrics", "test_data")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a training loop that decide how its stages are judged; fields not listed here are as in `Port`.

    Attributes:
        clip_grad_norm: largest norm after clipping on torch's side.
        clip_grad_value: largest absolute value after clipping.
        custom_step, custom_start: whether the port has a `jax_step` besides its losses, and a `jax_start`.
        multi_loss: the port has a `torch_step` and a `jax_step`.
        clips_inside: the optax chain does the clipping.
        casts: dtypes that torch's loss casts to.
        moves_weights: torch's loss, or a `torch_step`, changes parameters of a large model in place.
        no_twin: constants that are not compared.
        unchecked: flags that a program sets, and that the check leaves out.
        intended: what the port means to differ in, and its reason, in pairs.
        evaluation: functions of an evaluation that the port has, of `EVALUATION`.
    """

    accumulation_steps: int = 1
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    loss_normalization: str = "ddp"
    steps_per_epoch: int | None = None
    restore_at: int | None = None
    custom_step: bool = False
    custom_start: bool = False
    multi_loss: bool = False
    clips_inside: bool = False
    casts: tuple[str, ...] = ()
    moves_weights: bool = False
    no_twin: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    intended: tuple[tuple[str, str], ...] = ()
    evaluation: tuple[str, ...] = ()


def missing_names(given: Collection[str]) -> list[str]:
    """Return the names that a port needs in addition to those that it gives.

    >>> missing_names({"torch_model", "torch_loss", "torch_optimizer"})
    ['jax_model', 'jax_loss', 'batch (or torch_batch and jax_batch)', 'jax_optimizer']
    """
    names = {*given, *(["torch_optimizer"] if "configure_optimizers" in given else [])}
    own_step = "torch_step" in names
    of_step = ["jax_step", "configure_optimizers", "jax_optimizer"] if own_step else ["torch_loss", "jax_loss"]
    needed = ["torch_model", "jax_model", *of_step]
    for name in sorted({"batch", *([] if own_step else ["optimizer"])} - names):
        pair = [f"torch_{name}", f"jax_{name}"]
        needed += pair if names & {*pair} else [f"{name} (or {' and '.join(pair)})"]
    return [name for name in needed if name not in names]


def _absent(*_: Any) -> Any:
    """Raise in place of a missing loss."""
    raise InputError("a port with a torch_step has no losses")


@dataclass(frozen=True, kw_only=True)
class Port:
    """A training loop in both frameworks.

    Attributes:
        torch_model: makes the torch module.
        jax_model: makes its twin in jax: a module of flax.nnx or flax.linen, or any pytree of arrays, see
            `jaxddp.nn.plain`; (params, state) if jax_loss takes three arguments.
        torch_loss: (module, batch of tensors) -> the loss: a scalar, the batch's mean; or one value per element;
            or a pair (one value per element, their weights), or (mean, anything), whose mean counts.
        jax_loss: (model, batch of arrays) -> the same; or (params, state, batch) -> (the same, new state).
        batch: (step, rank) -> one replica's examples of one optimizer step, arrays by name, for both frameworks; see
            `jaxddp.data.batches.to_arrays`.
        torch_batch, jax_batch: replace `batch` if each framework has its own loader; examples are matched by their
            values, or by an entry "ids" if both have one that is an integer for each example.
        optimizer: for both sides, a name in `jaxddp.config.choices.OPTIMIZERS`, or a `TrainerConfig` with options and
            a schedule; None: each side has its own.
        torch_step: (module, optimizers, batch of tensors) -> the loss, or losses by name, after taking one step; for
            a program with several losses or optimizers. It needs `configure_optimizers`, which returns the optimizers
            in any form, and a `jax_step`, and replaces both losses. Gradients are averaged over the replicas after
            every backward pass, like DDP.
        torch_optimizer: parameters -> a torch optimizer.
        torch_scheduler: optimizer -> a scheduler, which takes a step after every optimizer step.
        configure_optimizers: replaces these two: module -> an optimizer, (optimizer, scheduler), ([optimizer],
            [scheduler]), or a dictionary as Lightning takes it.
        jax_optimizer: an optax transformation or an nnx.Optimizer, or model -> one of them.
        accumulation_steps: number of micro-batches into which each batch is cut along the first axis.
        clip_grad_norm: largest global norm of the averaged gradient, on both sides; None: no clipping.
        clip_grad_value: largest absolute value of its elements, likewise.
        torch_clip_grad_norm: the same on torch's side only, for an optax chain that clips.
        loss_normalization: "ddp", the mean of the replicas' means, or "global": the sum of all weighted losses over
            the sum of all weights.
        find_unused_parameters: DDP's option for losses that do not reach every parameter.
        steps_per_epoch: optimizer steps per epoch, needed to name a sampler's faults, and by Lightning's schedulers.
        total_steps: optimizer steps of the whole training, up to which both sides' learning rates must be equal, and
            over which the schedule of `optimizer` runs; None: those of the check, and what torch's scheduler shows.
        jax_step: replica step that replaces jaxddp's: (loss, optimizer, state, batch) -> (state, stages).
            `loss(params, buffers, batch)` is jax_loss as (mean, new buffers); `state` is a
            `jaxddp.state.TrainState` of the model's trees; the axis is called "replica"; with accumulation_steps
            A > 1 the arrays of the batch are (A, B / A, ...). `stages` may show "local_loss", "local_gradients",
            "gradients" and "clipped_gradients"; a stage that is not shown is judged by its effect on the update.
            With a `torch_step`: see `jaxddp.parity.jax_side.multi_loss_step`.
        jax_start: (params, rank) -> the parameters that a replica starts from; None: all start from the same.
        jax_restore: state -> state: saves and loads the state, which must not change it.
        restore_at: number of steps after which `jax_restore` is called.
        predict: (model, batch) -> outputs of a model in evaluation, an array or a tree of arrays; a jax model with a
            state takes (params, state, batch). It is the same function for both sides.
        metrics: (outputs of `predict`, batch) -> metrics by name, each one value per example, or a mean.
        torch_metrics, jax_metrics: replace `metrics` on their side.
        test_data: examples of the evaluation; None: those of the run. In a program the losses are then part of the
            evaluation, as in the trainers.
        names: jax prefixes to torch prefixes, where the two differ, or to rules; see `jaxddp.parity.port.rules`.
        transpose_kernel: see `jaxddp.parity.convert.Converter`.
        no_twin: names of constants, such as causal masks, that one of the two models holds as a buffer.
        unchecked: flags for the trainers that the check leaves out, which the report names; set for a program.
        intended: what the port means to differ in -> its reason: "initialisation", "rates" after the
            run's length, or another kind of trial beyond the run, of `jaxddp.parity.coverage.TRIALS`.

    Raises:
        InputError: a field has the wrong kind or value, or contradicts another.
    """

    torch_model: Callable[[], "torch.nn.Module"]
    jax_model: Callable[[], Any]
    torch_loss: Callable[["torch.nn.Module", Mapping[str, "torch.Tensor"]], Any] = _absent
    jax_loss: Callable[..., Any] = _absent
    batch: Callable[[int, int], Arrays] | None = None
    torch_batch: Callable[[int, int], Arrays] | None = None
    jax_batch: Callable[[int, int], Arrays] | None = None
    optimizer: str | TrainerConfig | None = None
    torch_step: Callable[["torch.nn.Module", Any, Mapping[str, "torch.Tensor"]], Any] | None = None
    torch_optimizer: Callable[[Iterable[Any]], "torch.optim.Optimizer"] | None = None
    torch_scheduler: Callable[["torch.optim.Optimizer"], Any] | None = None
    configure_optimizers: Callable[["torch.nn.Module"], Any] | None = None
    jax_optimizer: "optax.GradientTransformation | Any" = None
    accumulation_steps: int = 1
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    torch_clip_grad_norm: float | None = None
    loss_normalization: str = "ddp"
    find_unused_parameters: bool = False
    steps_per_epoch: int | None = None
    total_steps: int | None = None
    jax_step: Callable[[Any, Any, Any, Mapping[str, Any]], tuple[Any, Mapping[str, Any]]] | None = None
    jax_start: Callable[[Mapping[str, Any], int], Mapping[str, Any]] | None = None
    jax_restore: Callable[[Any], Any] | None = None
    restore_at: int | None = None
    predict: Callable[..., Any] | None = None
    metrics: Callable[[Any, Any], Mapping[str, Any]] | None = None
    torch_metrics: Callable[[Any, Any], Mapping[str, Any]] | None = None
    jax_metrics: Callable[[Any, Any], Mapping[str, Any]] | None = None
    test_data: Callable[[], Any] | None = None
    names: Names = field(default_factory=dict)
    transpose_kernel: Collection[str] = ()
    no_twin: Collection[str] = ()
    unchecked: tuple[str, ...] = ()
    intended: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_functions()
        self._check_step()
        functions = ("torch_step", "jax_step") if self.torch_step is not None else ("torch_loss", "jax_loss")
        for name in functions:  # the check hands batches around as flat dictionaries
            object.__setattr__(self, name, of_batches(getattr(self, name)))
        if isinstance(self.optimizer, str):
            check_name("optimizer", self.optimizer, OPTIMIZERS)
        if isinstance(self.optimizer, TrainerConfig):
            self.optimizer.check_used(baseline=type(self.optimizer)())
        if None not in (self.torch_optimizer, self.configure_optimizers):
            raise InputError("configure_optimizers: must not be given with torch_optimizer, which it replaces")
        pair = (self.torch_optimizer or self.configure_optimizers, self.jax_optimizer)
        if (self.optimizer is None) == (pair == (None, None)) or (self.optimizer is None and None in pair):
            raise InputError("optimizer: give either one for both sides, or torch_optimizer and jax_optimizer")
        if self.torch_optimizer is None and self.torch_scheduler is not None:
            raise InputError("torch_scheduler: needs torch_optimizer; the others have their own schedule")
        check_range("accumulation_steps", self.accumulation_steps)
        check_range("clip_grad_norm", self.clip_grad_norm)
        check_range("clip_grad_value", self.clip_grad_value)
        if None not in (self.clip_grad_norm or self.torch_clip_grad_norm, self.clip_grad_value):
            raise InputError("clip_grad_value: must not be given with a norm to clip to")
        check_range("clip_grad_norm", self.torch_clip_grad_norm, f"torch_clip_grad_norm {self.torch_clip_grad_norm}")
        if None not in (self.clip_grad_norm, self.torch_clip_grad_norm):
            raise InputError("torch_clip_grad_norm: must not be given with clip_grad_norm, which clips on both sides")
        check_name("loss_normalization", self.loss_normalization, LOSS_NORMALIZATIONS)
        if (self.jax_restore is None) != (self.restore_at is None):
            raise InputError("restore_at: must be given with jax_restore, as the number of steps before its call")
        if self.total_steps is not None and not (isinstance(self.total_steps, int) and self.total_steps > 0):
            raise InputError(f"total_steps {self.total_steps!r}: must be a positive number of optimizer steps")
        check_names(self.names)
        self._check_intended()

    def _check_intended(self) -> None:
        if not isinstance(self.intended, Mapping):
            raise InputError(f"intended: must be a dictionary, and is {type(self.intended).__name__}")
        for name, why in self.intended.items():
            check_name("intended", name, INTENDED)
            if not isinstance(why, str) or not why.strip():
                raise InputError(f'intended: {name}: must have a reason, as in {{"{name}": "as in the paper"}}')

    def _check_step(self) -> None:
        """Raise if a port with a `torch_step` has a field that the step replaces, or lacks one that it needs."""
        given = [name for name in ("torch_loss", "jax_loss") if getattr(self, name) is not _absent]
        if self.torch_step is None:
            if missing := sorted({"torch_loss", "jax_loss"}.difference(given)):
                raise InputError(f"has no {', '.join(missing)}")
            return
        done: dict[str, Any] = {"clip_grad_norm": None, "clip_grad_value": None, "accumulation_steps": 1}
        done |= {"loss_normalization": "ddp", "jax_start": None, "jax_restore": None, "optimizer": None}
        done |= {"find_unused_parameters": False, "torch_optimizer": None}
        given += [name for name, default in done.items() if getattr(self, name) != default]
        if given:
            raise InputError(f"{given[0]}: must not be given with torch_step and jax_step, which do it themselves")
        for name in ("jax_step", "configure_optimizers", "jax_optimizer"):
            if getattr(self, name) is None:
                raise InputError(f"{name}: must be given with torch_step")

    def _check_functions(self) -> None:
        required = ("torch_model", "jax_model", "torch_loss", "jax_loss")
        optional = ("batch", "torch_batch", "jax_batch", "torch_optimizer", "torch_scheduler", "configure_optimizers")
        for name in (*required, *optional, *EVALUATION, "torch_step", "jax_step", "jax_start", "jax_restore"):
            value = getattr(self, name)
            if not callable(value) and (value is not None or name in required):
                raise InputError(f"{name}: must be a function, and is {type(value).__name__}")
        given = self.jax_optimizer
        several = self.torch_step is not None and isinstance(given, Mapping)
        if given is not None and not hasattr(given, "update") and not callable(given) and not several:
            kind = type(given).__name__
            raise InputError(f"jax_optimizer: must be an optax transformation or an nnx.Optimizer, and is {kind}")
        if getattr(given, "__module__", "").startswith("optax.") and inspect.isfunction(given):
            name = given.__name__
            raise InputError(f"jax_optimizer: is the function optax.{name}; must be called, as in optax.{name}(1e-3)")
        if (self.batch is None) == (None in (self.torch_batch, self.jax_batch)):
            raise InputError("batch: give either one for both sides, or torch_batch and jax_batch")

    @property
    def facts(self) -> Facts:
        """Facts that decide how the port's stages are judged."""
        inside = self.torch_clip_grad_norm is not None
        return Facts(
            accumulation_steps=self.accumulation_steps,
            clip_grad_value=self.clip_grad_value,
            clip_grad_norm=self.torch_clip_grad_norm if inside else self.clip_grad_norm,
            loss_normalization=self.loss_normalization,
            steps_per_epoch=self.steps_per_epoch,
            restore_at=self.restore_at,
            custom_step=self.jax_step is not None and self.torch_step is None,
            multi_loss=self.torch_step is not None,
            custom_start=self.jax_start is not None,
            clips_inside=inside,
            no_twin=tuple(self.no_twin),
            unchecked=self.unchecked,
            intended=tuple(self.intended.items()),
            evaluation=tuple(name for name in EVALUATION if getattr(self, name) is not None),
        )

    @property
    def optimizer_config(self) -> TrainerConfig | None:
        """Optimizer of both sides, with its options and schedule; None if each side has its own."""
        return TrainerConfig(optimizer=cast(Any, self.optimizer)) if isinstance(self.optimizer, str) else self.optimizer

    def first_batch(self, side: Side) -> dict[str, np.ndarray]:
        """Return the first micro-batch of rank 0; see `micro_batches`."""
        return self.micro_batches(0, 0, side)[0]

    def micro_batches(self, step: int, rank: int, side: Side = "torch") -> list[dict[str, np.ndarray]]:
        """Return one replica's examples of one step as `accumulation_steps` flat dictionaries of equal size.

        Args:
            step, rank: counted from 0.
            side: the side to ask, where each has its own loader.

        Raises:
            InputError: the batch is not a dictionary of arrays of equal length, or cannot be cut evenly.
        """
        name = "batch" if self.batch is not None else f"{side}_batch"
        call = f"{name}({step}, {rank})"
        arrays = to_arrays(getattr(self, name)(step, rank), call)
        size, pieces = len(next(iter(arrays.values()))), self.accumulation_steps
        if size % pieces:
            raise InputError(f"accumulation_steps {pieces}: must divide the {size} examples of {call}")
        parts = {key: np.split(array, pieces) for key, array in arrays.items()}
        return [{key: of_key[piece] for key, of_key in parts.items()} for piece in range(pieces)]
