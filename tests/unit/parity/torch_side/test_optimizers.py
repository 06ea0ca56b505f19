"""Optimizers that a port's functions make: the forms that they may return, and one line for everything else."""

from functools import partial
from typing import Any

import numpy as np
import optax
import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from jaxddp.errors import InputError
from jaxddp.parity.port import Port
from torch_ref.lightning import Cadence
from torch_ref.program import MakeOptimizer, optimizer_of


def made(**fields: Any) -> tuple[torch.optim.Optimizer, Any]:
    functions: dict[str, Any] = dict.fromkeys(["torch_model", "jax_model", "torch_loss", "jax_loss"], lambda *_: None)
    port = Port(**functions, batch=lambda step, rank: {"x": np.ones(2)}, jax_optimizer=optax.sgd(0.1), **fields)
    model = torch.nn.Linear(3, 2)
    make = MakeOptimizer(port.torch_optimizer, port.torch_scheduler, port.configure_optimizers)
    return optimizer_of(make, model, list(model.parameters()))


def lightning(model: torch.nn.Module, **more: Any) -> dict[str, Any]:
    """Return Lightning's dictionary of an optimizer and a scheduler that multiplies the rate by 0.1."""
    optimizer, scheduler = scheduled(model)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **more}}


# Options of the dictionary and micro-batches per step -> rates of 8 steps, with 3 steps per epoch, as powers of 0.1.
CADENCES = [
    ({}, 1, [0, 0, 0, 1, 1, 1, 2, 2]),
    ({"frequency": 2}, 1, [0, 0, 0, 0, 0, 0, 1, 1]),
    ({"interval": "step"}, 1, [0, 1, 2, 3, 4, 5, 6, 7]),
    ({"interval": "step", "frequency": 2}, 1, [0, 0, 1, 1, 1, 2, 2, 2]),  # batches are counted in each epoch
    ({"interval": "step", "frequency": 4}, 2, [0, 0, 1, 1, 1, 2, 2, 2]),  # as are micro-batches
    ({"interval": "epoch", "frequency": 1}, 2, [0, 0, 0, 1, 1, 1, 2, 2]),
]


@pytest.mark.parametrize(("options", "pieces", "powers"), CADENCES)
def test_a_scheduler_in_a_dictionary_advances_as_lightning_advances_it(
    options: dict[str, Any], pieces: int, powers: list[int]
) -> None:
    model = torch.nn.Linear(3, 2)
    make = MakeOptimizer(None, None, lambda model: lightning(model, **options))
    optimizer, scheduler = optimizer_of(make, model, list(model.parameters()), Cadence(3, pieces))
    rates = []
    for _ in powers:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.1 * 0.1**power for power in powers])


plain_sgd = partial(torch.optim.SGD, lr=0.1)


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return plain_sgd(model.parameters())


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
    ("configure", "message"),
    [
        (lambda model: None, "must return a torch optimizer, and .* NoneType$"),
        (lambda model: [sgd(model)] * 2, "returns 2 optimizers; must be one"),
        (lambda model: {"scheduler": sgd(model)}, 'must return a dictionary with "optimizer", and returns .*sched'),
        (lambda model: lightning(model, monitor="val_loss"), "\"monitor\": 'val_loss': a scheduler that waits for"),
        (lambda model: lightning(model, interval="batch"), '"interval" batch: unknown'),
        (lambda model: lightning(model, interval="step", frequency=0), '"frequency" 0: must be an integer'),
        (lambda model: lightning(model), '"interval": "epoch", Lightning\'s default, needs .*steps_per_epoch'),
        (lambda model: lightning(model, interval="step", frequency=2), '"frequency": 2 needs .*steps_per_epoch'),
        (lambda model: (sgd(model), 0.5), "must return a scheduler with a method step, and returns float"),
        (
            lambda model: sgd(torch.nn.Linear(5, 4)),
            r"optimizes a tensor \(4, 5\) that is not a parameter of the given model",
        ),
    ],
)
def test_anything_else_is_told_in_a_line(configure: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^configure_optimizers: {message}"):
        made(configure_optimizers=configure)


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "message"),
    [
        (
            sgd,
            None,
            "torch_optimizer: is given the list of parameters, .*; for a function of the model call it configure_o",
        ),
        (
            lambda p: (plain_sgd(p), None),
            None,
            "torch_optimizer: must return a torch optimizer, and returns tuple; use con",
        ),
        (plain_sgd, lambda _: 0.5, "torch_scheduler: must return a scheduler with a method step, and returns"),
    ],
)
def test_a_function_of_the_parameters_returns_an_optimizer(optimizer: Any, scheduler: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        made(torch_optimizer=optimizer, torch_scheduler=scheduler)


def test_an_error_inside_of_the_users_function_stays_what_it_is() -> None:
    with pytest.raises(AttributeError, match="no attribute 'rate'"):
        made(torch_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=parameters[0].rate))
