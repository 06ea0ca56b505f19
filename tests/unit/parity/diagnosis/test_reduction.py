"""Faults between the loss and the optimizer, planted in a step written in loops: each is named."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxddp.parity.compare.clipping import Clipping
from jaxddp.parity.diagnosis.reduction.reduction_causes import (
    FLOOR,
    SHOWN,
    ReductionRecipe,
    ReductionStep,
    explain_received,
    explain_reduction,
)
from jaxddp.parity.diagnosis.search.decide import SEPARATION
from jaxddp.parity.report.sentences import line
from tests.support.reduction_steps import (
    CLIPPED,
    FAULTS,
    OVER,
    PIECES,
    RANKS,
    RIGHT,
    SHAPES,
    Global,
    MeanPerRank,
    NoEpsilon,
    NormOfRank,
    NotDivided,
    Stages,
    Step,
    Sum,
    Tensors,
    Twice,
    active,
    faulty,
    scaled,
    steps_of,
    total,
)


def named(
    port: Step, *shown: str, normalization: str = "ddp", **options: list[str]
) -> tuple[set[frozenset[str]], float]:
    """Return the names in the ruling, and the residual that they leave."""
    ruling = explain_reduction(
        active(steps_of(port, *shown)), ReductionRecipe(OVER[normalization], clipping=Clipping(0.5)), **options
    )
    left = max((hypothesis.residual for hypothesis in ruling.named), default=0.0)
    if ruling.named and ruling.runner_up is not None:
        assert ruling.runner_up.residual > max(SEPARATION * left, FLOOR)
    return {frozenset(hypothesis.faults) for hypothesis in ruling.named}, left


def test_the_reference_program_computes_the_step_in_loops() -> None:
    for port, normalization in ((Step(), "ddp"), (Global(), "global"), (MeanPerRank(), "rank")):
        for number, step in enumerate(steps_of(port)):
            predicted = ReductionRecipe(OVER[normalization], clipping=Clipping(1e3 if number == 1 else 0.5)).predict(
                step
            )
            for stage, tensors in step.shown.items():
                for name, value in tensors.items():
                    np.testing.assert_allclose(predicted[stage][name], value, rtol=0, atol=1e-13)  # measured: 2e-15
        stages = steps_of(port)[0].shown
        assert not np.allclose(stages["gradients"]["fc.bias"], stages["clipped_gradients"]["fc.bias"])


@pytest.mark.parametrize(("port", "names"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_named(port: type[Step], names: set[str]) -> None:
    faults, left = named(port(), tied=["out.weight"])
    assert faults == {frozenset({name}) for name in names}
    assert left <= RIGHT


@pytest.mark.parametrize("shown", ["local_gradients", "gradients", "clipped_gradients"])
def test_one_stage_is_enough_if_it_shows_the_fault(shown: str) -> None:
    assert named(MeanPerRank(), shown)[0] == {frozenset({"mean_per_rank"})}


def test_faults_that_one_stage_cannot_tell_apart_are_named_together() -> None:
    faults, _ = named(NotDivided(), "gradients")
    assert faults == {frozenset({"accumulation_not_divided"})}
    faults, _ = named(Sum(), "gradients")
    assert faults == {frozenset({name}) for name in ("sum_not_mean", "check_vma", "collective_in_loss")}


def test_means_over_micro_batches_or_ranks_are_named_where_the_reference_has_one_global_mean() -> None:
    assert named(Step(), normalization="global")[0] == {frozenset({"mean_per_micro_batch"})}
    assert named(MeanPerRank(), normalization="global")[0] == {frozenset({"mean_per_rank"})}


def test_two_faults_at_once_are_both_named() -> None:
    pairs, left = named(faulty(reduced=Sum.reduced, clipped=NoEpsilon.clipped)())
    assert frozenset({"sum_not_mean", "clip_epsilon"}) in pairs and left <= RIGHT
    assert all("clip_epsilon" in pair and len(pair) == 2 for pair in pairs)
    for shown in (SHOWN, ["gradients"]):  # which shows their product alone
        pairs, _ = named(faulty(divisor=NotDivided.divisor, reduced=Twice.reduced)(), *shown)
        assert frozenset({"accumulation_not_divided", "averaged_twice"}) in pairs


def test_a_factor_that_no_size_explains_is_fitted() -> None:
    def times(factor: float) -> type[Step]:
        return faulty(reduced=lambda self, local: [scaled(total(local), factor / RANKS)] * RANKS)

    says = {shown: _said(times(0.9)(), *shown) for shown in ((), ("gradients", "clipped_gradients"))}
    assert says == {
        (): ["reduced gradients times 0.9"],
        ("gradients", "clipped_gradients"): ["gradients times 0.9"],
    }
    assert _said(faulty(divisor=lambda self, *of: Step.divisor(self, *of) / 32)(), sizes={32: "the batch"}) == [
        "a sum over the batch, the reference takes the mean: local gradients times 32"
    ]
    assert not _said(times(0.8712345)())  # nobody writes that
    assert _said(faulty(reduced=times(0.9).reduced, clipped=NoEpsilon.clipped)()) == [
        "reduced gradients times 0.9; clipping divides by the norm, to which the reference adds 1e-06"
    ]


def _said(port: Step, *shown: str, **options: Any) -> list[str]:
    ruling = explain_reduction(active(steps_of(port, *shown)), CLIPPED, **options)
    assert all(hypothesis.residual <= RIGHT for hypothesis in ruling.named)
    return [line(hypothesis) for hypothesis in ruling.named]


def test_a_sum_over_the_elements_of_each_micro_batch_is_named() -> None:
    assert named(faulty(divisor=lambda self, counts, rank, piece: PIECES)())[0] == {frozenset({"loss_scale"})}


def test_a_fault_that_is_not_in_the_catalogue_gets_no_name() -> None:
    port = faulty(reduced=lambda self, local: [{name: x**3 for name, x in total(local).items()}] * RANKS)
    ruling = explain_reduction(active(steps_of(port())), CLIPPED)
    assert not ruling.named and not ruling.cut_short
    assert ruling.runner_up is not None and ruling.runner_up.residual > 1e-3


def test_a_difference_that_is_not_among_the_shown_stages_gets_no_name() -> None:
    """With equal counts a mean over each rank is the reference's: it explains all that is shown, as no fault does."""
    steps = [replace(step, counts=np.ones_like(step.counts)) for step in steps_of(Step())]
    shown = [CLIPPED.predict(step)["gradients"] for step in steps]
    for stages in ([{"gradients": x} for x in shown], [{} for _ in shown]):
        hidden = [replace(step, shown=of_step) for step, of_step in zip(steps, stages, strict=True)]
        assert not explain_reduction(hidden, CLIPPED).named
    assert not explain_received([({"w": np.ones((2, 3))}, {"w": np.ones(3)})], {}).named


def test_another_norm_is_read_off_where_gradients_are_not_shown_or_are_excerpts() -> None:
    for beyond in (1.0, 3.0):
        steps = [replace(step, beyond=beyond) for step in steps_of(Step())]
        port = replace(CLIPPED, clipping=Clipping(0.3))
        shown = [port.predict(step)["clipped_gradients"] for step in steps]
        hidden = [replace(step, shown={"clipped_gradients": x}) for step, x in zip(steps, shown, strict=True)]
        ruling = explain_reduction(active(hidden), CLIPPED)
        assert [line(one) for one in ruling.named] == ["clipped at norm 0.3, the reference clips at norm 0.5"]


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({"synchronised": False}, "no_sync"),
        ({"clip_first": True}, "clipped_before_mean"),
        ({"clip_by": "own"}, "clip_norm_local"),
    ],
)
def test_a_fault_is_named_where_each_replica_clips_excerpts_by_its_own_norm(wrong: dict[str, Any], fault: str) -> None:
    steps = [replace(step, local_beyond=np.array([1.0, 3.0, 2.0, 5.0])) for step in active(steps_of(Step()))]
    shown = [replace(CLIPPED, **wrong).predict(step)["clipped_gradients"] for step in steps]
    hidden = [replace(step, shown={"clipped_gradients": x}) for step, x in zip(steps, shown, strict=True)]
    assert (fault,) in {one.faults for one in explain_reduction(hidden, CLIPPED).named}
    assert not explain_reduction([replace(step, local_beyond=1.0) for step in hidden], CLIPPED).named


def test_two_faults_that_multiply_the_reduced_gradients_do_so_together() -> None:
    recipe = replace(CLIPPED, summed_at_once=True, factor=RANKS**2)  # summed again in place of averaged, and a sum
    steps = [replace(step, shown=recipe.predict(step)) for step in active(steps_of(Step()))]
    named = explain_reduction(steps, CLIPPED).named
    assert {"check_vma", "sum_not_mean"} in [{*one.faults} for one in named]


def test_a_micro_batch_without_a_label_has_no_mean() -> None:
    """Its 0/0 raises no warning, which would be an error here."""
    step = replace(steps_of(Step())[0], counts=np.zeros((RANKS, PIECES)))
    assert np.isnan(
        ReductionRecipe().predict(replace(step, sums={"w": np.zeros((RANKS, PIECES, 2))}))["gradients"]["w"]
    ).all()


def test_gradients_that_are_nan_get_no_name() -> None:
    steps = active(steps_of(Sum()))
    steps[0].shown["gradients"]["fc.bias"][0, 0] = np.nan
    assert not explain_reduction(steps, CLIPPED).named


def test_a_fault_that_only_the_first_step_has_is_not_named() -> None:
    mixed = [steps_of(Sum())[0], steps_of(Step())[2]]
    assert not explain_reduction(mixed, CLIPPED).named


@pytest.mark.parametrize("early", [(0,), (1, 2)])
def test_the_micro_batches_that_are_averaged_early_are_listed(early: tuple[int, ...]) -> None:
    def take(self: Step, counts: np.ndarray, sums: list[list[Tensors]], stale: list[list[Tensors]]) -> Stages:
        stages = Step.take(self, counts, sums, stale)
        shares = [
            [scaled(sums[rank][piece], 1 / self.divisor(counts, rank, piece)) for piece in range(PIECES)]
            for rank in range(RANKS)
        ]
        averaged = scaled(total(shares[rank][piece] for rank in range(RANKS) for piece in early), 1 / RANKS)
        late = [piece for piece in range(PIECES) if piece not in early]
        stages["gradients"] = [total([averaged, *(shares[rank][piece] for piece in late)]) for rank in range(RANKS)]
        stages["clipped_gradients"] = [self.clipped(gradients, {}) for gradients in stages["gradients"]]
        return stages

    ruling = explain_reduction(active(steps_of(faulty(take=take)())), CLIPPED)
    assert {hypothesis.faults for hypothesis in ruling.named} == {("synchronised_early",)}
    which = ", ".join(str(piece + 1) for piece in early)
    assert f"of 3 micro-batches only {which} " in line(ruling.named[0])


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [({"factor": 2}, "sum_not_mean"), ({"early": frozenset(range(19))}, "synchronised_early")],
)
def test_mistakes_with_many_micro_batches_are_named_within_the_replays_of_a_search(
    wrong: dict[str, Any], fault: str
) -> None:
    rng = np.random.default_rng(0)
    sums = {name: rng.normal(size=(2, 20, *shape)) for name, shape in SHAPES.items()}
    step = ReductionStep(np.ones((2, 20)), sums, None, {})
    shown = {"gradients": ReductionRecipe(**wrong).predict(step)["gradients"]}
    ruling = explain_reduction([replace(step, shown=shown)], ReductionRecipe())
    assert (fault,) in [one.faults for one in ruling.named] and not ruling.cut_short


def test_with_one_replica_no_fault_of_the_reduction_is_named() -> None:
    rng = np.random.default_rng(0)
    sums = {name: rng.normal(size=(1, 2, *shape)) for name, shape in SHAPES.items()}
    counts = np.array([[3.0, 5.0]])
    wrong = {name: (value / counts.reshape(1, 2, *(1,) * (value.ndim - 2))).sum(1) for name, value in sums.items()}
    ruling = explain_reduction([ReductionStep(counts, sums, None, {"gradients": wrong})], ReductionRecipe())
    assert {hypothesis.faults for hypothesis in ruling.named} == {("accumulation_not_divided",)}


def test_a_fault_is_named_with_other_gradients() -> None:
    for seed, port in itertools.product((1, 2), (Twice, MeanPerRank, NormOfRank)):
        ruling = explain_reduction(active(steps_of(port(), seed=seed)), CLIPPED)
        assert len(ruling.named) == 1 and ruling.named[0].residual <= RIGHT
