"""Faults planted in optax optimizers: those in the catalogue are named, others are not."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import optax
import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from jaxddp import optim
from jaxddp.parity.compare.clipping import Clipping
from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.diagnosis.optimizer import program
from jaxddp.parity.diagnosis.optimizer.update_causes import (
    FLOOR,
    OptimizerEvidence,
    explain_optimizer,
    reference_residuals,
)
from jaxddp.parity.diagnosis.optimizer.update_evidence import reference_program, replay, residuals
from jaxddp.parity.diagnosis.search.decide import SEPARATION, Ruling
from jaxddp.parity.report.sentences import line
from tests.faults.recipes import is_matrix as matrices
from tests.support.faulty_optax import Transformation
from tests.support.faulty_schedules import COSINE, cosine
from tests.support.optimizer_ports import (
    COMBINED,
    NOT_IN_THE_CATALOGUE,
    SINGLES,
    UNUSED,
    Planted,
    adagrad,
    adam,
    adamw,
    coupled,
    decayed,
    momentum,
    rmsprop,
    same_adamw,
    sgd,
)
from tests.support.optimizer_runs import matrices_decay, run, worst
from tests.support.schedule_ports import OTHER_SCHEDULES, SCHEDULES

CLEAN = 3e-14  # of the stage's norm; measured: up to 6e-15 (Adam), 2e-16 (the others)
TORCH = 1e-12  # torch shows an update only as a difference of weights; measured: up to 5e-14


def named(ruling: Ruling) -> set[frozenset[str]]:
    return {frozenset(hypothesis.faults) for hypothesis in ruling.named}


@pytest.mark.one_in(18, first=1)
@pytest.mark.parametrize("case", SINGLES + SCHEDULES + COMBINED)
def test_a_planted_fault_is_named(case: Planted) -> None:
    ruling = explain_optimizer(case.evidence())
    assert named(ruling) == set(case.causes)
    [first] = [hypothesis for hypothesis in ruling.named if frozenset(hypothesis.faults) == case.causes[0]]
    assert case.says in line(first)
    assert first.residual <= CLEAN
    runner_up = ruling.runner_up  # None: every other fault would have a value that nobody writes
    assert runner_up is None or runner_up.residual > SEPARATION * first.residual  # measured: 1e4 times at least


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", (SINGLES + SCHEDULES)[::7] + COMBINED[::7])
def test_a_planted_fault_is_named_with_other_weights_and_gradients(case: Planted) -> None:
    assert named(explain_optimizer(case.evidence(seed=1))) == set(case.causes)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("case", OTHER_SCHEDULES)
def test_a_schedule_of_any_shape_is_named_by_its_first_rate_that_differs(case: Planted) -> None:
    (named,) = explain_optimizer(case.evidence(), near=1e-6).named
    assert named.faults == ("schedule",) and case.says in line(named)
    assert named.residual <= CLEAN


@pytest.mark.large
@pytest.mark.parametrize("fault", NOT_IN_THE_CATALOGUE)
def test_a_fault_that_is_not_in_the_catalogue_gets_no_name(fault: str) -> None:
    torch_optimizer, jax_optimizer, *options = NOT_IN_THE_CATALOGUE[fault]
    ruling = explain_optimizer(run(torch_optimizer, jax_optimizer, **(options[0] if options else {})))
    assert not ruling.named
    assert ruling.runner_up is None or ruling.runner_up.residual > 1e-6  # measured: 3e-5 at least


@pytest.mark.parametrize(
    ("torch_optimizer", "jax_optimizer", "options"),
    [
        (decayed, optim.sgd(0.1, 0.9, weight_decay=1e-3), {}),
        (partial(momentum, dampening=0.3), optim.sgd(0.1, 0.9, dampening=0.3), {}),
        (adam, optax.adam(cosine(1e-3)), {"scheduler": COSINE}),
        (adamw, same_adamw(1e-3, mask=matrices), {"groups": matrices_decay}),
        (partial(coupled, amsgrad=True), optim.adam(1e-3, weight_decay=1e-2, amsgrad=True), {}),
        (partial(rmsprop, centered=True, momentum=0.9), optim.rmsprop(1e-2, centered=True, momentum=0.9), {}),
        (partial(adagrad, lr_decay=0.1, weight_decay=1e-2), optim.adagrad(1e-2, lr_decay=0.1, weight_decay=1e-2), {}),
    ],
)
def test_a_correct_port_leaves_rounding_only(
    torch_optimizer: Callable[..., Any], jax_optimizer: Transformation, options: dict[str, Any]
) -> None:
    evidence = run(torch_optimizer, jax_optimizer, steps=20, **options)
    assert worst(evidence) <= CLEAN < FLOOR
    assert explain_optimizer(evidence) == Ruling((), None)


@pytest.mark.parametrize(
    ("torch_optimizer", "options"),
    [
        (partial(decayed, nesterov=True), {"groups": matrices_decay}),
        (partial(decayed, dampening=0.3, maximize=True), {"unused": UNUSED}),
        (partial(momentum, dampening=0.3), {"scheduler": partial(OneCycleLR, max_lr=0.1, total_steps=60)}),
        (partial(coupled, amsgrad=True), {"unused": UNUSED}),
        (adamw, {"groups": matrices_decay, "scheduler": partial(OneCycleLR, max_lr=0.1, total_steps=60)}),
        (partial(rmsprop, momentum=0.9, weight_decay=1e-2), {"unused": UNUSED}),
        (partial(rmsprop, centered=True), {}),
        (partial(adagrad, lr_decay=0.1, weight_decay=1e-2, initial_accumulator_value=0.1), {"unused": UNUSED}),
    ],
)
def test_the_reference_program_computes_torchs_updates(
    torch_optimizer: Callable[..., Any], options: dict[str, Any]
) -> None:
    assert worst(with_torchs_updates(run(torch_optimizer, optax.sgd(1.0), steps=15, **options))) <= TORCH


@pytest.mark.parametrize(
    ("torch_optimizer", "jax_optimizer"), [(adam, optax.adam(1e-3)), (momentum, optax.sgd(0.1, momentum=0.9))]
)
def test_small_tensors_take_their_steps_together_and_as_each_alone(
    torch_optimizer: Callable[..., Any], jax_optimizer: Transformation, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence = run(torch_optimizer, jax_optimizer, steps=5, groups=matrices_decay, unused=UNUSED)
    one = reference_program(evidence)
    assert one is not None and 1 < len(one.together) < len(one.names), "decayed, not decayed and unused ones"
    together = [*replay(one, evidence)]
    monkeypatch.setattr(program, "SMALL", 0)
    other = reference_program(evidence)
    assert other is not None and len(other.together) == len(other.names)
    for joined, alone in zip(together, replay(other, evidence), strict=True):
        assert [*joined.update] == [*alone.update]
        assert alone.states and joined.states.keys() == alone.states.keys()
        assert max(residuals(alone.update, joined.update).values()) <= CLEAN
        for name, state in alone.states.items():
            assert state.keys() == joined.states[name].keys()
            for key, value in state.items():
                torch.testing.assert_close(joined.states[name][key], value, rtol=CLEAN, atol=0)


def with_torchs_updates(evidence: OptimizerEvidence) -> OptimizerEvidence:
    """Return the run without its last step, with torch's updates in place of optax's."""
    steps = [
        replace(step, update={name: after.params[name] - value for name, value in step.params.items()})
        for step, after in itertools.pairwise(evidence.steps)
    ]
    return replace(evidence, steps=steps)


def test_a_scale_of_which_any_multiple_fits_as_well_is_no_name() -> None:
    """Clipped gradients times a large number are clipped without the epsilon, and Adam does not see their scale."""
    port = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3))
    ruling = explain_optimizer(run(adam, port, clipping=Clipping(0.5), steps=3))
    assert named(ruling) == {frozenset({"clip_epsilon"})}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("rate", "plain"), [(3e-4 / 0.7, True), (1e-3 * 0.99985160961234, False)])
def test_a_number_that_nobody_writes_is_no_name(rate: float, plain: bool) -> None:
    ruling = explain_optimizer(run(adam, optax.adam(rate), steps=3), deep=False)
    assert named(ruling) == ({frozenset({"lr_scaled"})} if plain else set())
    assert ruling.runner_up is None or ruling.runner_up.plain


HIDDEN = (
    (Deviation("sum_not_mean", Statement("gradients_times", times=2, by="sum")), 2.0),
    (Deviation("averaged_twice", Statement("divided_twice", replicas=2)), 0.5),
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("torch_optimizer", "factor", "port", "causes"),
    [
        (sgd, 2.0, optax.sgd(0.1), [{"sum_not_mean"}, {"lr_scaled"}]),
        (adam, 2.0, optax.adam(1e-3), [{"sum_not_mean"}]),
        (adamw, 0.5, optax.adamw(1e-3, weight_decay=1e-4), [{"averaged_twice", "decay_value"}]),
        (momentum, 2.0, optax.sgd(0.1, momentum=0.8), [{"sum_not_mean", "betas"}]),
    ],
)
def test_a_factor_that_a_step_hides_is_named_alone_and_beside_another_fault(
    torch_optimizer: Any, factor: float, port: Any, causes: list[set[str]]
) -> None:
    evidence = run(torch_optimizer, optax.chain(optax.scale(factor), port))
    assert named(explain_optimizer(replace(evidence, factors=HIDDEN))) == {*map(frozenset, causes)}
    assert not named(explain_optimizer(evidence)) & {*map(frozenset, causes[:1])}  # if the step shows it


@pytest.mark.large
def test_a_hidden_factor_is_named_beside_another_fault_of_an_optimizer_of_full_tensors() -> None:
    port = optax.chain(optax.scale(2.0), optim.adafactor(1e-2, d=2.0))
    evidence = run(partial(torch.optim.Adafactor, lr=1e-2), port, steps=2)
    pair = frozenset({"sum_not_mean", "optimizer_option"})
    assert pair in named(explain_optimizer(replace(evidence, factors=HIDDEN)))
    assert not named(explain_optimizer(evidence))


# torch's optimizer, the option that the port has otherwise, and what is said about it.
OTHERS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("NAdam", {}, {"momentum_decay": 1e-3}, "momentum_decay 0.001, the reference has 0.004"),
    ("NAdam", {"weight_decay": 0.01}, {"weight_decay": 0.05}, "weight decay 0.05, the reference has 0.01"),
    ("RAdam", {}, {"betas": (0.9, 0.98)}, "beta2 0.98, the reference has 0.999"),
    (
        "RAdam",
        {},
        {"weight_decay": 0.01},
        "weight decay 0.01, as an L2 penalty, on all tensors, where the reference has",
    ),
    ("Adamax", {}, {"eps": 1e-6}, "eps 1e-6, the reference has 1e-8"),
    ("Adadelta", {}, {"rho": 0.95}, "rho 0.95, the reference has 0.9"),
    ("Rprop", {}, {"etas": (0.6, 1.2)}, "etas[0] 0.6, the reference has 0.5"),
    ("ASGD", {}, {"lambd": 1e-3}, "lambd 0.001, the reference has 0.0001"),
    ("Adagrad", {}, {"lr_decay": 0.1}, "lr_decay 0.1, the reference has 0"),
    ("Adafactor", {}, {"d": 2.0}, "d 2, the reference has 1"),
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("kind", "options", "wrong", "says"), OTHERS)
def test_any_option_of_any_optimizer_of_torch_is_named(
    kind: str, options: dict[str, Any], wrong: dict[str, Any], says: str
) -> None:
    options = {"lr": 1e-2, **options}
    port = getattr(optim, kind.lower())
    evidence = run(partial(getattr(torch.optim, kind), **options), port(**{**options, **wrong}))
    ruling = explain_optimizer(evidence)
    assert len(ruling.named) == 1 and says in line(ruling.named[0])
    assert ruling.named[0].residual <= CLEAN
    assert worst(run(partial(getattr(torch.optim, kind), **options), port(**options))) <= CLEAN < FLOOR


@pytest.mark.parametrize("kind", ["NAdam", "RAdam", "Rprop"])
def test_optaxs_rule_is_named_where_it_is_not_torchs(kind: str) -> None:
    evidence = run(partial(getattr(torch.optim, kind), lr=1e-2), getattr(optax, kind.lower())(1e-2))
    [named] = explain_optimizer(evidence).named
    assert named.faults == ("optax_rule",) and line(named).startswith(f"optax.{kind.lower()}'s rule: torch")
    assert named.residual <= CLEAN


def test_an_unknown_optimizer_is_not_explained() -> None:
    evidence = replace(run(adam, optax.adam(1e-3)), kind="Lion")
    assert reference_residuals(evidence) is None
    assert explain_optimizer(evidence) == Ruling((), None)


def test_updates_that_are_nan_are_not_explained() -> None:
    evidence = run(adam, optax.chain(optax.adam(1e-3), optax.scale(float("nan"))))
    assert explain_optimizer(evidence) == Ruling((), None)


@pytest.mark.large
def test_a_large_tensor_is_explained_from_a_sample() -> None:
    shapes = {"embedding.weight": (400, 100), "head.weight": (20, 100), "norm.bias": (20,)}
    ruling = explain_optimizer(run(adam, optax.adam(1e-3, eps=1e-7), shapes=shapes))
    assert named(ruling) == {frozenset({"eps_value"})}  # a loss scale would show in the state
    assert max(hypothesis.residual for hypothesis in ruling.named) <= CLEAN


def test_decay_after_the_update_is_named() -> None:
    rate, decay = 1e-2, 0.05
    inner = optax.adam(rate)

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = inner.update(gradients, state, params)
        return jax.tree.map(lambda u, p: (1 - rate * decay) * (p + u) - p, updates, params), state

    adamw_of_torch = partial(torch.optim.AdamW, lr=rate, weight_decay=decay)
    ruling = explain_optimizer(run(adamw_of_torch, optax.GradientTransformation(inner.init, update)))
    [first] = ruling.named
    assert first.faults == ("call_moved",)
    assert "after the update" in line(first)
    assert first.residual <= CLEAN
