"""Model, loss, optimizer and batches of a torch rank. Imports no jax."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from jaxddp.config import TrainConfig
from jaxddp.data.datasets import Dataset
from jaxddp.errors import InputError, complex_error
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.port import Facts, Port, PortSource
from jaxddp.parity.port.draws import DrawnPort
from jaxddp.parity.torch_side.draws import serving
from jaxddp.parity.torch_side.widened import InFloat64
from jaxddp.program.losses import named_losses
from torch_ref import comm_hooks, models, optim
from torch_ref.amp import autocast, grad_scaler
from torch_ref.comm_hooks import Hook
from torch_ref.ddp_methods import ddp_methods
from torch_ref.distributed import World
from torch_ref.gradient_hooks import GradientHook
from torch_ref.lightning import Cadence
from torch_ref.loader import Loader
from torch_ref.losses import Batch, CountFunction, LossFunction, Sums, count_labels, cross_entropy
from torch_ref.program import MakeOptimizer, cast_module, count_of, default_dtype, optimizer_of, sums

OptimizerMaker = Callable[[Iterable[nn.Parameter], World], tuple[Optimizer, LRScheduler | None]]
# (rank, world_size) -> the micro-batches of each of that rank's steps
Batches = Callable[[int, int], Iterator[list[Batch]]]


class TorchStep(NamedTuple):
    """A port's `torch_step`, which replaces the training step of torch_ref.

    Attributes:
        configure: module -> its optimizers, in any form.
        losses: (module, optimizers, batch) -> the losses by name, scalars, after taking the step.
    """

    configure: Callable[[nn.Module], Any]
    losses: Callable[[nn.Module, Any, Batch], dict[str, Any]]


def in_floats(losses: Mapping[str, Any]) -> dict[str, float]:
    """Return the losses of a `TorchStep` as numbers."""
    return {name: float(torch.as_tensor(loss).detach()) for name, loss in losses.items()}


class TorchSide(NamedTuple):
    """Arguments of a rank's training loop, whose steps are `torch_ref.step.train_step`, or the port's `torch_step`.

    Attributes:
        model: module in the run's dtype.
        loss_fn: (module, batch) -> sums of losses and of weights.
        make_optimizer: (parameters, world) -> optimizer and scheduler.
        batches: (rank, world_size) -> the micro-batches of each step.
        facts: facts about the training loop.
        find_unused_parameters: DDP's option.
        count_fn: batch -> sum of weights.
        buffers: see `jaxddp.config.TrainConfig`.
        ema_decay: see `jaxddp.config.TrainConfig`; None: no averaged weights.
        gradient_hooks: hooks on single gradients.
        own_parameters: the ranks' parameters differ and are recorded per rank.
        comm_hook: world -> DDP's communication hook and its state.
        scaler: loss scaler of mixed precision; None: no scaling.
        casts: dtypes that the loss has cast to so far; a run in float64 lifts such casts.
        torch_step: the port's `torch_step` and the function that makes its optimizers; None: the port has none.
        loss_in_ddp: compute the loss within DDP's forward pass, on the bare module, so that it may call any method.
    """

    model: nn.Module
    loss_fn: LossFunction
    make_optimizer: OptimizerMaker
    batches: Batches
    facts: Facts
    find_unused_parameters: bool = False
    count_fn: CountFunction = count_labels
    buffers: str = "rank0"
    ema_decay: float | None = None
    gradient_hooks: tuple[GradientHook, ...] = ()
    own_parameters: bool = False
    comm_hook: Callable[[World], tuple[Any, Hook]] = lambda world: (world.group, allreduce_hook)
    scaler: GradScaler | None = None
    casts: Collection[str] = ()
    torch_step: TorchStep | None = None
    loss_in_ddp: bool = False


@dataclass(frozen=True)
class BuiltIn:
    """A model and an optimizer of torch_ref.

    Attributes:
        config: model, optimizer, schedule and batch size.
        dataset: training examples.
    """

    config: TrainConfig
    dataset: Dataset

    @property
    def name(self) -> str:
        """Model and optimizer."""
        return f"{self.config.model} {self.config.optimizer}"

    def torch_side(self, steps: int, dtype: str) -> TorchSide:
        """Build the model and training loop of `torch_ref.train`; see `make_side` for the arguments."""
        config = self.config

        def batches(rank: int, world_size: int) -> Iterator[list[Batch]]:
            loader = Loader(self.dataset.train, config, world_size, [rank])
            return (step for epoch in count() for step in loader.epoch(epoch))

        return TorchSide(
            models.build(config, self.dataset).to(getattr(torch, dtype)),
            autocast(cross_entropy, config.amp),
            lambda parameters, world: optim.from_config(parameters, config, steps, world),
            batches,
            Facts(
                accumulation_steps=config.accumulation_steps,
                clip_grad_norm=config.clip_grad_norm,
                loss_normalization=config.loss_normalization,
            ),
            buffers=config.buffers,
            ema_decay=config.ema_decay,
            own_parameters=config.start_local_sgd_iter is not None,
            comm_hook=partial(comm_hooks.from_config, config),
            scaler=grad_scaler(config, torch.device("cpu")),
        )


# A small object that is pickled to a rank and becomes a `TorchSide` there.
Source = BuiltIn | PortSource


def make_side(source: Source, steps: int, dtype: str) -> TorchSide:
    """Build the torch side of a built-in model or of a port.

    Args:
        source: the model or the port.
        steps: optimizer steps of the run; schedules need their number.
        dtype: dtype of parameters, buffers and inputs.

    Raises:
        InputError: a port's model has complex tensors.
    """
    if isinstance(source, BuiltIn):
        return source.torch_side(steps, dtype)
    return side_of_port(source.port(), steps, dtype)


def side_of_port(port: Port, steps: int, dtype: str) -> TorchSide:
    """Build a port's torch side; see `make_side` for arguments and errors."""
    with default_dtype("float32"):  # draws the same weights for every dtype
        model = port.torch_model()
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise InputError(f"torch_model: must return a module, several in a torch.nn.ModuleDict, and returns {kind}")
    check_real(model)
    cast_module(model, dtype)
    casts: set[str] = set()

    def lifted(function: Callable[..., Any], *arguments: Any) -> Any:
        function = serving(port, function) if isinstance(port, DrawnPort) else function
        with InFloat64() if dtype == "float64" else nullcontext() as mode:
            returned = function(*arguments)
        casts.update(mode.seen if mode else ())
        return returned

    def step_losses(model: nn.Module, optimizers: Any, batch: Batch) -> dict[str, Any]:
        assert port.torch_step is not None, "called with one only"
        return named_losses("torch_step", lifted(port.torch_step, model, optimizers, batch))

    def loss_fn(model: nn.Module, batch: Batch) -> Sums:
        return sums(lifted(port.torch_loss, model, batch), batch)

    def make_optimizer(parameters: Iterable[nn.Parameter], world: World) -> tuple[Optimizer, LRScheduler | None]:
        if port.optimizer_config is not None:
            return optim.from_config(parameters, port.optimizer_config, port.total_steps or steps)
        make = MakeOptimizer(port.torch_optimizer, port.torch_scheduler, port.configure_optimizers)
        return optimizer_of(make, model, list(parameters), Cadence(port.steps_per_epoch, port.accumulation_steps))

    def batches(rank: int, world_size: int) -> Iterator[list[Batch]]:
        of_steps = (port.micro_batches(step, rank, "torch") for step in count())
        return ([to_batch(micro_batch, dtype) for micro_batch in micro_batches] for micro_batches in of_steps)

    unused = port.find_unused_parameters
    torch_step = None
    if port.configure_optimizers and port.torch_step:
        ddp_methods(model)
        torch_step = TorchStep(port.configure_optimizers, step_losses)
    of_loop = (model, loss_fn, make_optimizer, batches, port.facts, unused, count_of(loss_fn, model))
    return TorchSide(*of_loop, casts=casts, torch_step=torch_step, loss_in_ddp=True)


def check_real(model: nn.Module) -> None:
    """Raise `InputError` if a tensor of the state_dict is complex; a table that is not saved may be."""
    for name, tensor in model.state_dict().items():
        if tensor.is_complex():
            raise complex_error("torch_model", name, str(tensor.dtype)[6:])


def to_batch(arrays: dict[str, np.ndarray], dtype: str) -> dict[str, Tensor]:
    """Convert arrays to tensors: floating point to the run's dtype, integers to int64; masks and uint8 images stay."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.to(getattr(torch, dtype))
        image = tensor.dtype == torch.uint8 and tensor.ndim > 2  # whose sums and products wrap around at 256
        return tensor if image or tensor.dtype == torch.bool else tensor.long()

    return {name: cast(tensor) for name, tensor in tensors.items()}


def load_state(model: nn.Module, state: Arrays, strict: bool = True) -> None:
    """Copy a state_dict of NumPy arrays into the model, one at a time.

    Args:
        model: the model.
        state: the arrays.
        strict: raise `KeyError` if one is missing or left over.
    """
    tensors = model.state_dict()
    if strict and (odd := sorted(tensors.keys() ^ state.keys())):
        raise KeyError(f"missing or left over: {', '.join(odd)}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in state:
                tensor.copy_(torch.from_numpy(state[name]))
