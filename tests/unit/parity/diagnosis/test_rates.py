"""Learning rates in float32, as some of optax's schedules compute them: other faults are still named exactly."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import optax
import pytest
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR

from jaxddp import optim
from jaxddp.parity.diagnosis.optimizer.update import NEAR
from jaxddp.parity.diagnosis.optimizer.update_causes import (
    FLOOR,
    OptimizerEvidence,
    explain_optimizer,
    reference_residuals,
)
from jaxddp.parity.diagnosis.optimizer.update_evidence import reference_program, replay, residuals
from jaxddp.parity.report.sentences import line
from tests.support.optimizer_ports import AT_NORM, Planted, adam, adamw, decayed, momentum, planted, rmsprop
from tests.support.optimizer_runs import run, worst

EXPONENTIAL = partial(ExponentialLR, gamma=0.9)
COSINE = partial(LambdaLR, lr_lambda=lambda n: (n + 1) / 4 if n < 3 else (1 + math.cos(math.pi * (n - 3) / 27)) / 2)


def falling(lr: float) -> Callable[[Any], Any]:
    return optax.exponential_decay(lr, 1, 0.9)


def cosine(lr: float) -> Callable[[Any], Any]:
    return optax.warmup_cosine_decay_schedule(lr / 4, lr, 3, 30)


CLIPPING = optax.clip_by_global_norm(1.9)
FAULTY = [
    planted("decay_value", adamw, optax.adamw(falling(1e-3)), "decay 0.0001, the ref", scheduler=EXPONENTIAL),
    planted("decay_value", adamw, optax.adamw(cosine(1e-3)), "decay 0.0001, the ref", scheduler=COSINE),
    planted("eps_value", adam, optax.adam(cosine(1e-3), eps=1e-7), "eps 1e-7", scheduler=COSINE),
    planted("betas", adam, optax.adam(cosine(1e-3), b1=0.95), "0.95", scheduler=COSINE),
    planted("betas", momentum, optim.sgd(falling(0.1), 0.8), "0.8", scheduler=EXPONENTIAL),
    planted("nesterov", momentum, optax.sgd(falling(0.1), 0.9, nesterov=True), scheduler=EXPONENTIAL),
    planted("scheduler_too_fast", adam, optax.adam(optax.exponential_decay(1e-3, 1, 0.9**3)), scheduler=EXPONENTIAL),
    planted("rmsprop_decay", rmsprop, optim.rmsprop(falling(1e-2), 0.9), scheduler=EXPONENTIAL),
    # Changes the update by less than the rounding of the rate does.
    planted("clip_epsilon", adam, optax.chain(CLIPPING, optax.adam(cosine(1e-3))), scheduler=COSINE, clipping=AT_NORM),
]
RIGHT = [
    pytest.param(adam, optax.adam(cosine(1e-3)), COSINE, id="adam"),
    pytest.param(decayed, optim.sgd(falling(0.1), 0.9, weight_decay=1e-3), EXPONENTIAL, id="sgd"),
]


def plainly(evidence: OptimizerEvidence) -> float:
    """Return the residual of the reference's recipe with learning rates in float64."""
    replayed = replay(reference_program(evidence), evidence)
    return max(max(residuals(step.update, predicted).values()) for step, predicted, _ in replayed)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("torch_optimizer", "jax_optimizer", "scheduler"), RIGHT)
def test_a_learning_rate_in_float32_is_no_difference(torch_optimizer: Any, jax_optimizer: Any, scheduler: Any) -> None:
    evidence = run(torch_optimizer, jax_optimizer, scheduler=scheduler)
    assert worst(evidence) < FLOOR  # measured: up to 1.4e-16
    assert 1e-9 < plainly(evidence) < NEAR  # measured: 1.1e-7 for both
    assert not explain_optimizer(evidence, near=NEAR).named


@pytest.mark.large
@pytest.mark.parametrize("case", FAULTY)
def test_a_fault_beside_a_learning_rate_in_float32_is_named(case: Planted) -> None:
    evidence = case.evidence()
    assert not explain_optimizer(evidence).named
    ruling = explain_optimizer(evidence, near=NEAR)
    assert {frozenset(hypothesis.faults) for hypothesis in ruling.named} == set(case.causes)
    assert any(case.says in line(hypothesis) for hypothesis in ruling.named)
    assert all(hypothesis.residual < FLOOR for hypothesis in ruling.named)  # measured: up to 3.1e-16


@pytest.mark.parametrize(
    ("off", "names"),
    [
        (lambda count: 3e-8, ["learning rate times 1.00000003"]),
        (lambda count: 1e-7 / (count + 1), ["the learning rate is off by 1e-07 of the largest, as where a part of it"]),
        (lambda count: 3e-6 / (count + 1), []),
    ],
)
def test_a_learning_rate_that_is_nearly_right_but_not_a_float32_is_a_difference(off: Any, names: list[str]) -> None:
    evidence = run(adam, optax.adam(lambda count: 1e-3 * (1 + off(count)) * 0.9**count), scheduler=EXPONENTIAL)
    left = reference_residuals(evidence)
    assert min(max(of_step.values()) for of_step in left) > 1e-8
    said = [line(one) for one in explain_optimizer(evidence, deep=False).named]
    assert len(said) == len(names) and all(one.startswith(name) for one, name in zip(said, names, strict=True))


@pytest.mark.parametrize(("steps", "faults"), [(17, ["rate_rounded"]), (18, ["warmup_start", "rate_rounded"])])
def test_a_learning_rate_that_is_made_of_float32_numbers_is_named(steps: int, faults: list[str]) -> None:
    """Optax's one cycle interpolates in float64 between float32 numbers; its rise takes a step more than torch's."""
    rates = optax.schedules.piecewise_interpolate_schedule("cosine", 0.004, {steps: 25.0, 60: 0.1})
    cycle = partial(OneCycleLR, max_lr=0.1, total_steps=60, cycle_momentum=False)
    evidence = replace(run(momentum, optax.sgd(rates, 0.9), scheduler=cycle), highest=0.1)
    (found,) = explain_optimizer(evidence, near=NEAR).named
    assert list(found.faults) == faults and found.residual < FLOOR  # measured: up to 4.1e-16
