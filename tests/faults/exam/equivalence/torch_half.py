"""Hash a torch half: initial state, traced loss and gradients, optimizers and their schedules."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from .graphs import graph_digest, tensor_digest
from .halves import Unprovable, batch_of, batches_digest, called
from .jaxprs import hashed

FIELDS = frozenset(
    {"torch_model", "torch_loss", "torch_step", "torch_batch", "torch_optimizer", "torch_scheduler"}
)  # those that are traced
SCHEDULED = ("lr", "momentum", "betas", "weight_decay")
STEPS = 1000  # of a schedule


def torch_program(names: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each part of a torch half; halves with equal digests are one program.

    Raises:
        Unprovable: the half has a part that is not traced here.
    """
    if unknown := {name for name in names if name.startswith("torch_")} - FIELDS:
        raise Unprovable(f"a port with {', '.join(sorted(unknown))}")
    torch.manual_seed(0)
    model = called(names["torch_model"], names)
    digests = {"start": _state_digest(model), "random": tensor_digest(torch.get_rng_state())}
    digests["batches"] = batches_digest(names, "torch")
    made = [*_made(names, model)]
    digests["optimizers"] = hashed(*(_optimizer_digest(x, model) for x in made if _is_optimizer(x)))
    digests["rates"] = _rates_digest(made)
    batch = batch_of(names, "torch")
    size = min(map(len, batch.values()))
    model.double()
    for examples in (size, size - 1):
        cut = {name: _tensor(array[:examples]) for name, array in batch.items()}
        digests[f"loss of {examples}"] = _traced(names, model, cut)
    return digests


def _tensor(array: Any) -> torch.Tensor:
    tensor = torch.as_tensor(array)
    return tensor.double() if tensor.is_floating_point() else tensor


def _state_digest(model: torch.nn.Module) -> str:
    """Return the hash of a model's tensors, of which share memory, and of which are trained."""
    tensors = model.state_dict(keep_vars=True)
    first = {tensor.data_ptr(): name for name, tensor in reversed(tensors.items())}
    return hashed(*((name, first[x.data_ptr()], x.requires_grad, tensor_digest(x)) for name, x in tensors.items()))


def _made(names: Mapping[str, Any], model: torch.nn.Module) -> Iterator[Any]:
    """Yield the optimizers and schedulers of a half."""
    if "configure_optimizers" in names:
        yield from _leaves(names["configure_optimizers"](model))
    elif "torch_optimizer" in names:
        optimizer = names["torch_optimizer"](model.parameters())
        yield optimizer
        if "torch_scheduler" in names:
            yield names["torch_scheduler"](optimizer)


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        yield tree
        return
    for branch in tree:
        yield from _leaves(branch)


def _is_optimizer(made: Any) -> bool:
    return isinstance(made, torch.optim.Optimizer)


def _optimizer_digest(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> str:
    if not type(optimizer).__module__.startswith("torch.optim"):
        raise Unprovable(f"an optimizer {type(optimizer).__name__}")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [
        {key: [names[id(p)] for p in value] if key == "params" else value for key, value in sorted(group.items())}
        for group in optimizer.param_groups
    ]
    return hashed(type(optimizer), sorted(optimizer.defaults.items()), groups)


def _rates_digest(made: list[Any]) -> str:
    """Return the hash of what the schedules set, over many steps."""
    groups = [group for optimizer in filter(_is_optimizer, made) for group in optimizer.param_groups]
    has_schedule = not all(map(_is_optimizer, made))
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(STEPS if has_schedule else 0):
            rates.append([group.get(key) for group in groups for key in SCHEDULED])
            for optimizer_or_schedule in made:
                optimizer_or_schedule.step()
    return hashed(rates)


def _traced(names: Mapping[str, Any], model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> str:
    """Return the digest of the loss with its gradients, or of a whole step."""
    function = _step if "torch_step" in names else _loss_and_gradients
    tensors = {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items()}
    with _as_in_the_check():
        return graph_digest(lambda batch: function(names, model, batch), [dict(batch)], tensors)


@contextmanager
def _as_in_the_check() -> Iterator[None]:
    """Within the `with` statement, functions do not check the values of tensors, which a trace does not have.

    New tensors are float64 there, as in the check.
    """
    torch.distributions.Distribution.set_default_validate_args(False)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with mock.patch.object(functional, "one_hot", _one_hot):
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.distributions.Distribution.set_default_validate_args(__debug__)


def _one_hot(tensor: torch.Tensor, num_classes: int) -> torch.Tensor:
    return (tensor[..., None] == torch.arange(num_classes)).long()


def _loss_and_gradients(names: Mapping[str, Any], model: torch.nn.Module, batch: Any) -> list[Any]:
    """Return the outputs of the loss, and the gradients of each of them."""
    result = names["torch_loss"](model, batch)
    outputs = [leaf for leaf in _leaves(result) if isinstance(leaf, torch.Tensor)]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = [
        torch.autograd.grad(output, parameters, _cotangent(output), retain_graph=True, allow_unused=True)
        for output in outputs
        if output.requires_grad
    ]
    return [result, gradients]


def _cotangent(output: torch.Tensor) -> torch.Tensor:
    """Return a cotangent of which no two elements are equal."""
    return torch.linspace(1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)


def _step(names: Mapping[str, Any], model: torch.nn.Module, batch: Any) -> Any:
    """Return the losses of a step, which changes the parameters."""
    made = names["configure_optimizers"](model)
    return names["torch_step"](model, made, batch)
