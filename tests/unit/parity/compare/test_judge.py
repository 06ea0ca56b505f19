"""Each stage is judged by its inputs, so a fault shows at its own stage and not at those that follow."""

import copy
import math
from typing import Any

import numpy as np
import pytest

from jaxddp.parity.compare.clipping import Clipping
from jaxddp.parity.compare.judge import ALLOWED, Judgement, judge
from jaxddp.parity.port import Facts

RANKS, STEPS = 2, 3
SHAPES = {"fc.weight": (2, 3), "fc.bias": (2,)}
CLIP = 0.5  # smaller than the norms of the gradients below
CLIPPED = Facts(clip_grad_norm=CLIP)
OF_STAGES = [("local_loss", "loss"), ("buffers", "bn.mean"), ("optimizer_state", "mu:fc.weight")]


class Shown(dict[str, Any]):
    """A record in memory, with notes."""

    notes: dict[str, Any]


def tensors(rng: np.random.Generator, *leading: int) -> dict[str, np.ndarray]:
    return {name: rng.normal(size=(*leading, *shape)) for name, shape in SHAPES.items()}


def reference(facts: Facts) -> list[Shown]:
    """Make records of a torch run, each stage computed from the one before."""
    rng = np.random.default_rng(0)
    records = []
    for step in range(STEPS):
        local = tensors(rng, RANKS)
        gradients = {name: value.mean(0) for name, value in local.items()}
        clipped = Clipping(facts.clip_grad_norm).clip(gradients)
        record = Shown(
            samples={"x": np.arange(RANKS * 4, dtype="uint64").reshape(RANKS, 4) + step},
            local_loss={"loss": rng.normal(size=RANKS)},
            local_gradients=local,
            gradients=gradients,
            clipped_gradients=clipped,
            update={name: -0.1 * value for name, value in clipped.items()},
            params=tensors(rng),
            buffers={"bn.mean": rng.normal(size=2), "bn.num_batches_tracked": np.int64(step)},
            optimizer_state={f"exp_avg:{name}": value for name, value in tensors(rng).items()},
        )
        record.notes = {"groups": [{"lr": 0.1, "weight_decay": 0.0, "names": [name]} for name in SHAPES]}
        records.append(record)
    return records


def forced(theirs: list[Shown]) -> list[Shown]:
    """Make the records of a jax run that is equal to torch's."""
    records = copy.deepcopy(theirs)
    for record in records:
        del record["buffers"]["bn.num_batches_tracked"]  # jax's BatchNorm has none
        state = record["optimizer_state"]
        record["optimizer_state"] = {key.replace("exp_avg", "mu"): value for key, value in state.items()}
        record |= {"spread": {}, "hyperparameters": {"learning_rate": np.float32(0.1), "momentum": np.float32(3)}}
    return records


def judged(theirs: list[Shown], ours: list[Shown], facts: Facts, optimizer: str = "AdamW") -> Judgement:
    return judge(theirs, ours, facts, optimizer)  # type: ignore[arg-type]


def ruled(change: Any = None, facts: Facts = CLIPPED) -> Judgement:
    """Judge a run that equals torch's except for what `change(record, step)` does to its records."""
    theirs = reference(facts)
    ours = forced(theirs)
    for step, record in enumerate(ours):
        if change is not None:
            change(record, step)
    return judged(theirs, ours, facts)


def test_equal_runs_differ_in_no_stage() -> None:
    judgement = ruled()
    assert not judgement.first
    results = judgement.results()
    assert list(results) == [stage for stage in ALLOWED if stage in results] and results.keys() == ALLOWED.keys()
    for stage, result in results.items():
        assert len(result.residuals) == STEPS
        assert max(result.residuals) == (0 if stage != "hyperparameters" else pytest.approx(1.5e-8, rel=0.1))
    assert results["update"].tensors == {name: (shape, 0.0) for name, shape in SHAPES.items()}
    assert results["optimizer_state"].tensors["exp_avg:fc.bias"] == ((2,), 0.0)


@pytest.mark.parametrize(
    ("stage", "tensor"),
    [*OF_STAGES, ("update", "fc.bias"), ("clipped_gradients", "fc.bias")],
)
def test_only_the_stage_that_differs_is_located(stage: str, tensor: str) -> None:
    def change(record: Shown, step: int) -> None:
        record[stage][tensor] = record[stage][tensor] + (1e-9 if step > 0 else 1e-15)

    first = ruled(change).first
    assert first.keys() == {stage}
    assert (first[stage].step, first[stage].tensor) == (2, tensor.replace("mu:", "exp_avg:"))
    assert 1e-10 < first[stage].residual < 1e-7 and first[stage].detail == ""


def test_summed_gradients_are_a_fault_of_the_reduction_only() -> None:
    def change(record: Shown, step: int) -> None:
        record["gradients"] = {name: 2 * value for name, value in record["gradients"].items()}
        record["clipped_gradients"] = Clipping(CLIP).clip(record["gradients"])

    judgement = ruled(change)
    assert judgement.first.keys() == {"gradients"}
    assert judgement.first["gradients"].step == 1
    assert max(judgement.residuals["clipped_gradients"][0].values()) > 1e-7  # they differ from torch's by the epsilon


def test_the_mean_of_wrong_local_gradients_counts_as_right() -> None:
    def change(record: Shown, step: int) -> None:
        local = record["local_gradients"]
        local["fc.weight"] = 1.001 * local["fc.weight"]
        record["gradients"] = {name: value.mean(0) for name, value in local.items()}
        record["clipped_gradients"] = Clipping(CLIP).clip(record["gradients"])

    judgement = ruled(change)
    assert judgement.first.keys() == {"local_gradients"}
    assert max(judgement.residuals["gradients"][0].values()) > 1e-4
    # The same holds if only one replica's gradient is wrong.
    assert ruled(lambda record, step: record["local_gradients"]["fc.bias"].__imul__([[1.0], [1.1]])).first.keys() == {
        "local_gradients",
        "gradients",  # torch's here, not the mean of the local ones
    }


def test_replicas_with_other_examples_are_not_compared() -> None:
    def change(record: Shown, step: int) -> None:
        if step == 1:
            record["samples"]["x"][1] += 100
            record["local_loss"]["loss"][1] += 1
            for value in record["local_gradients"].values():
                value[1] += 1
            record["gradients"] = {name: value.mean(0) for name, value in record["local_gradients"].items()}
            record["clipped_gradients"] = Clipping(CLIP).clip(record["gradients"])

    judgement = ruled(change)
    assert judgement.first.keys() == {"samples"}
    assert (judgement.first["samples"].step, judgement.first["samples"].residual) == (2, 0.5)
    assert max(judgement.residuals["local_loss"][1].values()) > 0.1  # the residual is still reported

    def also(record: Shown, step: int) -> None:
        change(record, step)
        record["local_loss"]["loss"][0] += 1e-3 if step == 1 else 0

    assert ruled(also).first.keys() == {"samples", "local_loss"}
    # With a global mean every replica's gradient depends on the others' counts.
    in_total = Facts(clip_grad_norm=CLIP, loss_normalization="global")
    assert ruled(also, in_total).first.keys() == {"samples"}


def test_replicas_that_drift_apart_are_located_at_the_first_such_stage() -> None:
    def drift(*stages: str) -> Any:
        def change(record: Shown, step: int) -> None:
            if step == 1:
                for stage in stages:
                    of_all = np.stack([record[stage]["fc.bias"]] * RANKS)
                    of_all[1] += 1e-14
                    record["spread"][f"{stage}:fc.bias"] = of_all

        return change

    first = ruled(drift("params")).first
    assert first.keys() == {"update"}
    assert (first["update"].step, first["update"].tensor) == (2, "fc.bias")
    assert first["update"].residual < 1e-14  # the drift of one element, of the stage's norm
    assert first["update"].detail == "the replicas differ from each other in 1 tensors"
    assert ruled(drift("gradients", "params")).first.keys() == {"gradients"}


def test_stages_that_a_port_does_not_show_are_not_judged() -> None:
    def hide(*stages: str) -> Any:
        return lambda record, step: [record.pop(stage) for stage in stages]

    own = Facts(clip_grad_norm=CLIP, custom_step=True)
    hidden = ruled(hide("gradients", "clipped_gradients"), own)
    assert not hidden.first and "gradients" not in hidden.results()
    inside = Facts(clip_grad_norm=CLIP, clips_inside=True)
    assert "clipped_gradients" not in ruled(None, inside).results()
    assert "clipped_gradients" not in ruled(None, Facts()).results()


def test_a_jax_steps_local_stages_are_judged_by_the_loss_alone() -> None:
    own = Facts(clip_grad_norm=CLIP, custom_step=True)

    def change(record: Shown, step: int) -> None:
        record["pure_local_gradients"] = copy.deepcopy(record["local_gradients"])
        record["pure_local_loss"] = dict(record["local_loss"])
        record["local_gradients"] = {name: 3 * value for name, value in record["local_gradients"].items()}
        record["update"] = {name: 2 * value for name, value in record["update"].items()}

    judgement = ruled(change, own)
    assert judgement.first.keys() == {"own_local_gradients"}  # the diagnosis judges the update by its inputs
    assert max(judgement.residuals["local_gradients"][0].values()) > 0.1
    assert "own_local_gradients" not in judgement.results()


def test_zeros_of_jax_equal_missing_tensors_of_torch_only() -> None:
    def change(record: Shown, step: int) -> None:
        for stage in ("local_gradients", "gradients", "clipped_gradients"):
            shape = (RANKS, 4) if stage == "local_gradients" else (4,)
            record[stage]["unused.weight"] = np.zeros(shape)

    assert not ruled(change).first
    assert ruled(lambda record, step: record["update"]["fc.bias"].fill(0)).first.keys() == {"update"}


@pytest.mark.parametrize(
    ("name", "value", "residual"),
    [("learning_rate", 0.1001, pytest.approx(1e-3, rel=1e-3)), ("weight_decay", 1e-8, 1.0)],
)
def test_hyperparameters_are_compared_where_both_show_them_also_with_0(name: str, value: float, residual: Any) -> None:
    first = ruled(lambda record, step: record["hyperparameters"].update({name: np.float32(value)})).first
    assert (first["hyperparameters"].tensor, first["hyperparameters"].residual) == (name, residual)


def test_the_tolerance_of_updates_includes_the_rounding_of_parameters() -> None:
    facts = Facts()
    theirs = reference(facts)
    for record in theirs:
        record["update"] = {name: 1e-6 * value for name, value in record["update"].items()}
    ours = forced(theirs)
    rounding = 1e-10 * float(np.linalg.norm([*map(np.linalg.norm, theirs[0]["update"].values())]))
    ours[0]["update"]["fc.bias"][0] += rounding
    judgement = judged(theirs, ours, facts)
    result = judgement.results()["update"]
    assert not judgement.first
    assert ALLOWED["update"] < result.residuals[0] <= result.allowed == judgement.allowed("update")


@pytest.mark.parametrize(
    ("stage", "tensor"),
    [*OF_STAGES, *((stage, "fc.weight") for stage in ("local_gradients", "gradients", "clipped_gradients", "update"))],
)
def test_a_stage_that_is_0_in_torch_alone_has_a_finite_residual(stage: str, tensor: str) -> None:
    """A schedule may start at 0, a loss may be 0: the residual is then relative to jax's norm."""
    theirs = reference(CLIPPED)
    ours = forced(theirs)
    ours[0][stage] |= {"fc.weight": 5 + ours[0][stage]["fc.weight"]} if "fc.weight" in ours[0][stage] else {}
    for name, value in theirs[0][stage].items():
        theirs[0][stage][name] = 0 * value
    residuals = judged(theirs, ours, CLIPPED).residuals[stage][0]
    assert max(residuals, key=residuals.__getitem__) == tensor.replace("mu:", "exp_avg:")
    assert 0.5 < max(residuals.values()) <= 1.0
    ours[0][stage] = {name: 0 * value for name, value in ours[0][stage].items()}
    assert not any(judged(theirs, ours, CLIPPED).residuals[stage][0].values())


def test_infinities_of_a_mask_hide_no_difference_of_other_buffers() -> None:
    theirs = reference(Facts())
    for record in theirs:
        record["buffers"]["mask"] = np.array([0.0, -math.inf])
    ours = forced(theirs)
    assert not judged(theirs, ours, Facts()).first
    ours[1]["buffers"]["bn.mean"] = 1.01 * ours[1]["buffers"]["bn.mean"]
    assert judged(theirs, ours, Facts()).first["buffers"].tensor == "bn.mean"
    ours[1]["buffers"]["mask"] = np.array([0.0, math.inf])
    assert judged(theirs, ours, Facts()).first["buffers"].residual == math.inf


def test_nan_differs_unless_torch_has_nan_too() -> None:
    judgement = ruled(lambda record, step: record["local_loss"]["loss"].__setitem__(0, math.nan))
    assert judgement.first["local_loss"].residual == math.inf
    theirs = reference(Facts())
    theirs[0]["local_loss"]["loss"][0] = math.nan
    assert not judged(theirs, forced(theirs), Facts()).first


def test_only_steps_that_both_sides_have_taken_are_compared() -> None:
    theirs = reference(Facts())
    judgement = judged(theirs, forced(theirs)[:2], Facts())
    assert {len(result.residuals) for result in judgement.results().values()} == {2}
    assert not judged(theirs, [], Facts()).results()


@pytest.mark.parametrize(
    ("kind", "jax", "optimizer"), [("momentum_buffer", "trace", "SGD"), ("exp_avg_sq", "nu", "Adam")]
)
def test_optimizer_states_are_matched_under_both_names(kind: str, jax: str, optimizer: str) -> None:
    theirs = reference(Facts())
    ours = forced(theirs)
    for record, other in zip(theirs, ours, strict=True):
        record["optimizer_state"] = {f"{kind}:{name}": np.ones(shape) for name, shape in SHAPES.items()}
        other["optimizer_state"] = {f"{jax}:{name}": np.ones(shape) for name, shape in SHAPES.items()}
    assert not judged(theirs, ours, Facts(), optimizer).first
    ours[1]["optimizer_state"][f"{jax}:fc.bias"] *= 1.01
    assert judged(theirs, ours, Facts(), optimizer).first["optimizer_state"].step == 2
    # The frameworks store RMSprop's buffer in different units.
    of_rmsprop = judged(theirs, ours, Facts(), "RMSprop").results()
    assert ("optimizer_state" in of_rmsprop) == (kind != "momentum_buffer")


def test_gradients_that_cancel_between_replicas_are_shown_given_the_local_ones() -> None:
    theirs = reference(CLIPPED)
    for record in theirs:
        local = record["local_gradients"]
        local["fc.bias"][1] = -local["fc.bias"][0]  # their mean is 0, and of the weight it is small
        local["fc.weight"][1] = 1e-6 - local["fc.weight"][0]
        record["gradients"] = {name: value.mean(0) for name, value in local.items()}
        record["clipped_gradients"] = Clipping(CLIP).clip(record["gradients"])
    ours = forced(theirs)
    for record in ours:
        record["local_gradients"]["fc.weight"][0] += 1e-15
        record["gradients"] = {name: value.mean(0) for name, value in record["local_gradients"].items()}
        record["clipped_gradients"] = Clipping(CLIP).clip(record["gradients"])
    judgement = judged(theirs, ours, CLIPPED)
    assert not judgement.first and not [*judgement.exceeding()]
    together, alone = (judgement.results(alone=alone)["gradients"] for alone in (False, True))
    assert max(together.residuals) > together.allowed and max(alone.residuals) < 1e-15


def test_a_stage_that_nothing_judges_by_its_inputs_is_beyond() -> None:
    def change(record: Shown, step: int) -> None:
        record["optimizer_state"]["mu:fc.bias"] += 1e-3 * (step == STEPS - 1)

    judgement = ruled(change, Facts(clip_grad_norm=CLIP, custom_step=True))
    assert not judgement.first
    ((stage, located),) = judgement.exceeding()
    assert (stage, located.step, located.tensor) == ("optimizer_state", STEPS, "exp_avg:fc.bias")
    assert located.residual > located.allowed == ALLOWED["optimizer_state"]
