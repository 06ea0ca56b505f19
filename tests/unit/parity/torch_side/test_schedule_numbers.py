"""Find the number of torch's scheduler with which it has another rate."""

from pathlib import Path

import pytest
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, PolynomialLR

from jaxddp.parity.torch_side.schedule_numbers import Place, replaced

STEPS = 8


def factor(step: int) -> float:
    return max(1 - step / STEPS, 0.25)


def rates(scheduler: LRScheduler) -> list[float]:
    found = []
    for _ in range(3):
        found.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (Place(PolynomialLR, 0, "total_iters"), [0.8, 0.6, 0.4]),
        (Place(PolynomialLR, 1, "total_iters"), [0.8, 0.7, 0.6]),  # no such scheduler is made
    ],
)
def test_a_scheduler_is_made_with_another_number(place: Place, expected: list[float]) -> None:
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.8)
    with replaced(place, 4):
        scheduler = PolynomialLR(optimizer, total_iters=STEPS)
    assert rates(scheduler) == pytest.approx(expected)


def test_a_function_has_another_number_within_the_statement_alone() -> None:
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.8)
    with replaced(Place(LambdaLR, 0, "lr_lambda", "STEPS"), 4):
        scheduler = LambdaLR(optimizer, factor)
    assert rates(scheduler) == pytest.approx([0.8, 0.6, 0.4])
    assert factor(1) == 1 - 1 / STEPS and Path(factor.__code__.co_filename) == Path(__file__)
