"""The torch side of a program: module, loss, metrics and optimizer, as the training loop takes them."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from jaxddp.config.choices import COUNT_OF
from jaxddp.config.name_patterns import frozen_names
from jaxddp.data.batches import from_arrays
from jaxddp.errors import InputError, check_weights
from jaxddp.program import Program, bound, built_in
from jaxddp.program.losses import named_metrics, shown_metrics
from torch_ref.config import TorchTrainerConfig
from torch_ref.lightning import UNKNOWN, Cadence, unpacked
from torch_ref.losses import Batch, CountFunction, LossFunction, Sums, example_anomaly

NEEDED = ("torch_model", "train_data")
OPTIMIZERS = ("torch_optimizer", "configure_optimizers")


class MakeOptimizer(NamedTuple):
    """A program's functions that make its optimizer: the first with or without the second, or else the third."""

    torch_optimizer: Callable[[Any], Any] | None
    torch_scheduler: Callable[[Optimizer], Any] | None
    configure_optimizers: Callable[[nn.Module], Any] | None

    @classmethod
    def of(cls, program: Program, **given: Any) -> "MakeOptimizer":
        """Return those of a program, bound to what they ask for by name."""
        return cls(*(bound(program.get(name), **given) for name in cls._fields))


def program_of(config: TorchTrainerConfig) -> Program:
    """Return the program of a configuration, bound to its options.

    Raises:
        InputError: it lacks a name.
    """
    program: Program = getattr(config, "PROGRAM", None) or built_in()
    needed = (*NEEDED, *(("configure_optimizers",) if program.get("torch_step") else ("torch_loss",)))
    program.need(*needed, reason=", which torch_ref.train needs")
    return program.bound(config).located()


def module_of(program: Program, config: TorchTrainerConfig) -> nn.Module:
    """Make the module, drawn in float32 whatever the run's `--dtype`, with frozen parameters.

    Raises:
        InputError: `torch_model` returns no module, or `--freeze` matches no parameter or all of them.
    """
    torch.manual_seed(config.seed)
    with default_dtype("float32"):
        module = program.get("torch_model")()
    if not isinstance(module, nn.Module):
        raise InputError(f"torch_model: must return a module, and returns {type(module).__name__}")
    for name in frozen_names("--freeze", config.freeze, dict(module.named_parameters())):
        module.get_parameter(name).requires_grad_(False)
    cast_module(module, config.dtype)
    return module


def cast_module(module: nn.Module, dtype: str) -> None:
    """Cast a module's tensors of floating point; complex ones stay complex, in two numbers of the dtype.

    `nn.Module.to` would cut off their imaginary parts.

    >>> module = nn.Module()
    >>> module.register_buffer("turns", torch.tensor([1 + 2j]), persistent=False)
    >>> cast_module(module, "float64")
    >>> module.turns
    tensor([1.+2.j], dtype=torch.complex128)
    """
    {"float32": module.float, "float64": module.double}[dtype]()  # which leave complex tensors as they are
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_complex():
            tensor.data = tensor.data.to(getattr(torch, dtype).to_complex())


def loss_of(program: Program, detect_anomaly: bool = False) -> LossFunction:
    """Return `torch_loss` as a function of a flat batch that returns sums."""
    loss = program.get("torch_loss", _no_loss)

    def of_flat(model: nn.Module, batch: Batch) -> Sums:
        returned = bound(loss, train=model.training)(model, from_arrays(batch))
        known = isinstance(returned, dict) and {"loss", "count"} <= returned.keys()
        of_batch: Sums = returned if known else sums(returned, batch, model.training, detect_anomaly)
        if model.training and torch.is_grad_enabled() and not of_batch["loss"].requires_grad:
            raise InputError("torch_loss: depends on no parameter that learns")
        return of_batch

    return of_flat


def _no_loss(model: nn.Module, batch: Any) -> Tensor:
    """Replace the loss of a program with a `torch_step`, whose tests have only metrics."""
    return torch.tensor(torch.nan)


def sums(returned: Any, batch: Batch, train: bool = True, detect_anomaly: bool = False) -> Sums:
    """Return what a loss function returns as sums: "loss", "count" and metrics.

    Args:
        returned: the loss, or one per element, or a pair of it and the elements' weights, of it and metrics by name,
            or of a mean and anything else, which is left out.
        batch: the batch.
        train: a mean counts once in training, and as often as there are examples in evaluation. One element for several
            examples, as of `mean(keepdim=True)`, is a mean.
        detect_anomaly: add what `example_anomaly` returns in training, if each example has a loss.

    Raises:
        InputError: it is none of these, or the mean of an empty batch.

    >>> sums((torch.tensor([1.0, 2.0]), torch.tensor([1, 0])), {})
    {'loss': tensor(1.), 'count': tensor(1.)}
    """
    values, more = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(values, Tensor):
        raise InputError("torch_loss: must return the loss, or one per element, or a pair of these and their weights")
    metrics: Mapping[str, Any] = more if isinstance(more, Mapping) else {}
    weights = None if isinstance(more, Mapping) else more
    check_weights("torch_loss", values.shape, weights)
    size, shape = _size(batch), values.shape
    if values.ndim and values.numel() == 1 < size and weights is None:
        values = values.reshape(())
    if not values.ndim and not size:
        if train:
            raise InputError("the loss is a mean over the batch, and a rank's is empty; return one per example")
        values = torch.zeros_like(values)  # which counts 0
    if not train and values.ndim and len(values) != size:
        raise InputError(
            f"torch_loss: returns {tuple(shape)} for {size} examples; must be a mean, or have a row for each"
        )
    weights = weights if values.ndim and weights is not None else torch.ones_like(values)
    weights = weights if values.ndim or train else weights * size
    of_metrics = {name: torch.as_tensor(x).detach() for name, x in shown_metrics(metrics).items()}
    shown = {name: (x * weights).sum() for name, x in of_metrics.items() if x.shape in ((), shape)}
    if detect_anomaly and train and values.ndim and len(values) == size:
        shown |= example_anomaly(values * weights)
    return {"loss": (values * weights).sum(), "count": weights.sum().to(values.dtype), **shown}


def count_of(loss_fn: LossFunction, module: nn.Module) -> CountFunction:
    """Return the function that computes only a batch's count; it takes a forward pass of a copy, with its buffers."""

    def count(batch: Batch) -> Tensor:
        with torch.no_grad():
            return loss_fn(copy.deepcopy(module), batch)["count"]

    return count


def evaluation_of(program: Program, loss_fn: LossFunction) -> LossFunction:
    """Return the loss of a test with the program's metrics, `torch_metrics` or `metrics`, of `predict`'s result."""
    name = "torch_metrics" if program.get("torch_metrics") else "metrics"
    if (measure := program.get(name)) is None:
        return loss_fn
    (predict,) = program.need("predict", reason=", of whose results metrics are computed")

    def of_flat(model: nn.Module, batch: Batch) -> Sums:
        totals, nested, size = dict(loss_fn(model, batch)), from_arrays(batch), _size(batch)
        metrics = named_metrics(name, measure(predict(model, nested), nested), size, torch.as_tensor)
        for metric, value in metrics.items():
            if metric in totals:
                raise InputError(f"{name}: {metric}: is a metric of the step, or of the loss; choose another name")
            count = value.numel() if value.ndim else size
            value = value if size else torch.zeros_like(value)  # the mean of no examples is NaN
            totals[metric] = value.sum() if value.ndim else value * count
            totals[COUNT_OF + metric] = torch.tensor(float(count), device=value.device)
        return totals

    return of_flat


def optimizer_of(
    make: MakeOptimizer, model: nn.Module, parameters: list[nn.Parameter], cadence: Cadence = UNKNOWN
) -> tuple[Optimizer, Any]:
    """Make the optimizer of a program, and its scheduler or None.

    Args:
        make: has `torch_optimizer`, with `torch_scheduler` or without, or `configure_optimizers`.
        model: the module.
        parameters: its parameters.
        cadence: when schedulers in Lightning's dictionaries advance.

    Raises:
        InputError: a function takes or returns something other than its name says.
    """
    if make.configure_optimizers is not None:
        name = "configure_optimizers"
        optimizer, scheduler = unpacked(make.configure_optimizers(model), cadence)
    else:
        name, optimizer, scheduler = "torch_optimizer", _of_parameters(make, parameters), None
    if not (hasattr(optimizer, "step") and hasattr(optimizer, "param_groups")):
        advice = "" if make.configure_optimizers else "; use configure_optimizers(model) for (optimizer, scheduler)"
        raise InputError(f"{name}: must return a torch optimizer, and returns {type(optimizer).__name__}{advice}")
    _check_parameters(name, optimizer, parameters)
    if make.torch_scheduler is not None:
        name, scheduler = "torch_scheduler", make.torch_scheduler(optimizer)
    if scheduler is not None and not hasattr(scheduler, "step"):
        kind = type(scheduler).__name__
        raise InputError(f"{name}: must return a scheduler with a method step, and returns {kind}")
    return optimizer, scheduler


def _of_parameters(make: MakeOptimizer, parameters: list[nn.Parameter]) -> Any:
    assert make.torch_optimizer is not None, "or configure_optimizers"
    try:
        return make.torch_optimizer(parameters)
    except AttributeError as error:
        if error.obj is not parameters:
            raise
        raise InputError(
            f"torch_optimizer: is given the list of parameters, which has no {error.name}; for a function of the model "
            "call it configure_optimizers"
        ) from error


def _check_parameters(name: str, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    trained = {id(parameter) for parameter in parameters}
    others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in trained]
    if others:
        shape = tuple(others[0].shape)
        raise InputError(f"{name}: optimizes a tensor {shape} that is not a parameter of the given model")


def _size(batch: Batch) -> int:
    return len(next(iter(batch.values()))) if batch else 0


@contextmanager
def default_dtype(dtype: str) -> Iterator[None]:
    """Let torch make tensors in this dtype by default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        yield
    finally:
        torch.set_default_dtype(before)
