"""A rank's `torch_step`: gradients are averaged after each backward pass, and what cannot be followed is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jaxddp.errors import InputError
from jaxddp.parity.torch_side.multi_loss_loop import StepRecorder
from torch_ref.distributed import World
from torch_ref.program_step import AveragedGradients, Optimizers


class Alike(World):
    """Two ranks, of which the other has the same values."""

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        return tensor.mul_(2) if op == "sum" else tensor


def averaged(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> list[list[int]]:
    """Compute the loss's gradients; return the sizes of the parameters after each average."""
    calls: list[list[int]] = []
    AveragedGradients(model, Alike(world_size=2), lambda reached: calls.append([p.numel() for p in reached]))
    loss(model).backward()
    return calls


def test_gradients_accumulate_over_backward_passes() -> None:
    model = nn.Linear(3, 1, bias=False)

    def loss(model: nn.Module) -> Tensor:
        y = model(torch.ones(1, 3)).sum()
        y.backward(retain_graph=True)
        return 2 * y

    assert averaged(model, loss) == [[3], [3]]
    torch.testing.assert_close(model.weight.grad, torch.full((1, 3), 3.0))


def test_a_parameter_that_a_step_unfreezes_is_averaged() -> None:
    model = nn.Linear(3, 1).requires_grad_(False)

    def loss(model: nn.Module) -> Tensor:
        assert not any(parameter.requires_grad for parameter in model.parameters())
        model.weight.requires_grad_(True)
        return model(torch.ones(1, 3)).sum()

    assert averaged(model, loss) == [[3]] and model.bias.grad is None


def test_an_optimizer_of_a_tensor_outside_of_the_module_is_refused() -> None:
    model, alpha = nn.Linear(3, 1), torch.zeros(1, requires_grad=True)
    made = {"model": torch.optim.SGD(model.parameters(), lr=1.0), "alpha": torch.optim.Adam([alpha])}
    with pytest.raises(InputError, match=r"holds a tensor \(1,\) that torch_model's module does not"):
        Optimizers(made, model)
    assert Optimizers([made["model"]], model).kind == "SGD"


def test_the_states_of_all_optimizers_are_seen_and_none_is_changed() -> None:
    model = nn.ModuleDict({"actor": nn.Linear(3, 1, bias=False), "critic": nn.Linear(3, 1, bias=False)})
    made = [torch.optim.Adam(module.parameters()) for module in model.values()]
    optimizers = Optimizers(made, model)
    for module in model.values():
        module(torch.ones(1, 3)).sum().backward()
    for one in made:
        one.step()
    assert all(optimizers.state[parameter]["step"] == 1 for parameter in model.parameters())
    assert [len(one.state) for one in made] == [1, 1]


def recorder(model: nn.Module) -> Any:
    one = StepRecorder.__new__(StepRecorder)
    one.names = {id(p): name for name, p in model.named_parameters()}
    return one


def test_a_step_with_a_closure_is_refused() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.register_step_pre_hook(recorder(model).before_step)
    with pytest.raises(InputError, match="with a closure"):
        optimizer.step(lambda: model(torch.ones(1, 3)).sum())
