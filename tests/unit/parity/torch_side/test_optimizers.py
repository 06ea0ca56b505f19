"""Optimizers that a port's functions make: the forms that they may return, and one line for everything else."""

from typing import Any

import numpy as np
import optax
import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from jaxddp.errors import InputError
from jaxddp.parity.port import Port
from jaxddp.parity.torch_side.optimizers import optimizer_of_port


def made(**fields: Any) -> tuple[torch.optim.Optimizer, Any]:
    functions: dict[str, Any] = dict.fromkeys(["torch_model", "flax_model", "torch_loss", "flax_loss"], lambda *_: None)
    port = Port(**functions, batch=lambda step, rank: {"x": np.ones(2)}, flax_optimizer=optax.sgd(0.1), **fields)
    model = torch.nn.Linear(3, 2)
    return optimizer_of_port(port, model, list(model.parameters()))


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def scheduled(model: torch.nn.Module) -> tuple[torch.optim.SGD, StepLR]:
    optimizer = sgd(model)
    return optimizer, StepLR(optimizer, 1)


@pytest.mark.parametrize(
    ("configure", "has_scheduler"),
    [
        (sgd, False),
        (lambda model: [sgd(model)], False),
        (lambda model: (sgd(model), None), False),
        (lambda model: ([sgd(model)], []), False),
        (scheduled, True),
        (lambda model: tuple([part] for part in scheduled(model)), True),
    ],
)
def test_configure_optimizers_may_return_what_lightnings_does(configure: Any, has_scheduler: bool) -> None:
    optimizer, scheduler = made(configure_optimizers=configure)
    assert isinstance(optimizer, torch.optim.SGD) and isinstance(scheduler, StepLR) == has_scheduler
    assert has_scheduler or scheduler is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"torch_optimizer": sgd},
            "torch_optimizer: is given the list of parameters, which has no parameters; for a function of the model "
            "call it configure_optimizers$",
        ),
        (
            {"torch_optimizer": lambda parameters: (torch.optim.SGD(parameters, lr=0.1), None)},
            "torch_optimizer: must return a torch optimizer, and returns tuple; use configure_optimizers",
        ),
        (
            {"configure_optimizers": lambda model: None},
            "configure_optimizers: must return a torch optimizer, and .* NoneType$",
        ),
        (
            {"configure_optimizers": lambda model: [sgd(model)] * 2},
            "configure_optimizers: returns 2 optimizers; must be one",
        ),
        (
            {"configure_optimizers": lambda model: {"optimizer": sgd(model)}},
            r"configure_optimizers: must return an optimizer, or \(optimizer, scheduler\), not a dictionary",
        ),
        (
            {"configure_optimizers": lambda model: (sgd(model), 0.5)},
            "configure_optimizers: must return a scheduler with a method step, and returns float",
        ),
        (
            {"configure_optimizers": lambda model: sgd(torch.nn.Linear(5, 4))},
            r"configure_optimizers: optimizes a tensor \(4, 5\) that is not a parameter of the given model",
        ),
        (
            {"torch_optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "torch_scheduler": lambda optimizer: 0.5},
            "torch_scheduler: must return a scheduler with a method step, and returns float",
        ),
    ],
)
def test_anything_else_is_told_in_a_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        made(**fields)


def test_an_error_inside_of_the_users_function_stays_what_it_is() -> None:
    with pytest.raises(AttributeError, match="no attribute 'rate'"):
        made(torch_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=parameters[0].rate))
