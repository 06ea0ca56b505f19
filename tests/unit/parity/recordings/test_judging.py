"""Comparisons of recordings: equal runs are equal, and each planted mistake is told where it begins, and why."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch

from jaxddp.optim import adafactor
from jaxddp.parity import Report, compare_runs
from jaxddp.parity.recordings.judge import ALLOWED
from jaxddp.parity.recordings.judgement import RecordedJudgement
from tests.support.recorded_loops import NAMES, batch_of, train_jax, train_torch

MARGIN = 3.0  # between the largest residual of equal runs and what is allowed


@pytest.fixture(scope="module")
def torch_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch") / "run"
    train_torch(folder, clip=0.5)
    return folder


def clipped(tx: Any, norm: float = 0.5) -> Any:
    return optax.chain(optax.clip_by_global_norm(norm), tx)


def adamw(**options: Any) -> Any:
    return clipped(optax.adamw(**{"learning_rate": 1e-2, "weight_decay": 0.01, **options}))


def compared(torch_run: Path, folder: Path, names: Mapping[str, str] | None = None, **options: Any) -> Report:
    train_jax(folder, **{"tx": adamw(), **options})
    return compare_runs(torch_run, folder, names)


def found(report: Report) -> list[tuple[str, int, str]]:
    """Return stage, step and first name of each difference."""
    return [(d.stage, d.step, d.cause.names[0] if d.cause else "") for d in report.differences]


def test_equal_runs_are_equal_with_room_to_spare(torch_run: Path, tmp_path: Path) -> None:
    report = compared(torch_run, tmp_path / "jax", lr=lambda step: 1e-2)
    assert report.verdict == "equal", str(report)
    assert {*report.stages} >= {*ALLOWED, "samples", "hyperparameters", "update"} - {"local_gradients"}
    for stage, result in report.stages.items():
        worst = max(value for value in result.residuals if value == value)
        assert worst <= result.allowed / MARGIN, f"{stage}: {worst}"
    assert "Torch clips at norm 0.5" in str(report).replace("\n         ", " ")


def shifted(step: int, rank: int) -> dict[str, np.ndarray]:
    """Return the next step's examples from step 4 on."""
    return batch_of(step + (step >= 4), rank)


def rolled(step: int, rank: int) -> dict[str, np.ndarray]:
    batch = batch_of(step, rank)
    return {**batch, "y": np.roll(batch["y"], 1)}


def without_biases(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


MISTAKES: dict[str, tuple[dict[str, Any], tuple[str, int, str]]] = {
    "decay": ({"tx": adamw(weight_decay=1e-4)}, ("update", 1, "decay_value")),
    "decay of some tensors": ({"tx": adamw(weight_decay=0.01, mask=without_biases)}, ("update", 1, "decay_mask")),
    "eps": ({"tx": adamw(eps=1e-5)}, ("update", 1, "eps_value")),
    "beta": ({"tx": adamw(b1=0.8)}, ("update", 2, "betas")),
    "rate": ({"tx": adamw(learning_rate=2e-2)}, ("update", 1, "lr_scaled")),
    "no clipping": ({"tx": optax.adamw(1e-2, weight_decay=0.01)}, ("update", 1, "clip_missing")),
    "a sum for a mean": ({"scale": 16.0}, ("gradients", 1, "loss_scale")),
    "GELU by tanh": ({"approximate": True}, ("local_loss", 1, "")),
    "biased variance": ({"biased": True}, ("buffers", 1, "")),
    "momentum of statistics": ({"momentum": 0.99}, ("buffers", 1, "")),
    "momentum of the mean, behind a bias": ({"mean_momentum": 0.8}, ("buffers", 1, "")),
    "other examples": ({"data": shifted}, ("samples", 4, "")),
    "labels rolled": ({"data": rolled}, ("samples", 1, "neighbours_values")),
    "other weights": ({"seed": 1}, ("params", 1, "different_start")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_where_it_begins(mistake: str, torch_run: Path, tmp_path: Path) -> None:
    options, expected = MISTAKES[mistake]
    report = compared(torch_run, tmp_path / "jax", **options)
    assert report.verdict == "different"
    assert found(report)[0] == expected, str(report)
    if mistake in ("GELU by tanh", "biased variance"):
        assert "jaxddp check PROGRAM.py" in str(report).replace("\n         ", " ")


def test_two_mistakes_are_both_told_and_different_weights_hide_no_mistake_of_the_optimizer(
    torch_run: Path, tmp_path: Path
) -> None:
    report = compared(torch_run, tmp_path / "jax", seed=1, tx=adamw(weight_decay=0.1), data=rolled)
    expected = [("params", 1, "different_start"), ("samples", 1, "neighbours_values"), ("update", 1, "decay_value")]
    assert found(report) == expected, str(report)
    assert "each example has the previous one's values" in " ".join(str(report).split())


def test_a_schedule_that_differs_is_told_with_its_step(tmp_path: Path) -> None:
    def rate(step: int) -> float:
        return 1.0 if step < 4 else 0.1

    train_torch(tmp_path / "torch", make=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), schedule=rate)
    tx = optax.sgd(optax.piecewise_constant_schedule(0.1, {4: 0.1}), momentum=0.9)  # a step late
    train_jax(tmp_path / "jax", tx=tx, lr=lambda step: 0.1 if step < 5 else 0.01, show=("grads",))
    report = compare_runs(tmp_path / "torch", tmp_path / "jax")
    assert ("hyperparameters", 4, "") in found(report), str(report)
    assert "learning rate 0.1 at step 4, the reference has 0.01" in str(report).replace("\n         ", " ")
    train_jax(tmp_path / "whole", tx=tx)
    report = compare_runs(tmp_path / "torch", tmp_path / "whole")
    assert found(report)[0][:2] == ("update", 4) and found(report)[0][2].startswith(("lr_", "schedule")), str(report)


@pytest.mark.parametrize(("step", "equal"), [(1, False), (5, True)])
def test_a_rate_is_compared_with_the_highest_so_far(step: int, equal: bool, tmp_path: Path) -> None:
    """Near its end a cosine is 1 + cos, whose rounding in float32 is large beside it."""

    def rate(number: int) -> float:
        return 1.0 if number < 5 else 1e-4

    train_torch(tmp_path / "torch", make=lambda p: torch.optim.SGD(p, lr=0.1), schedule=rate)
    tx = optax.sgd(optax.piecewise_constant_schedule(0.1, {4: 1e-4}))
    train_jax(tmp_path / "jax", tx=tx, lr=lambda number: 0.1 * rate(number) * (1 + 1e-4 * (number == step)))
    report = compare_runs(tmp_path / "torch", tmp_path / "jax")
    assert (report.verdict == "equal") == equal, str(report)
    assert equal or ("hyperparameters", step, "") in found(report)


def test_a_schedule_that_differs_is_told_beside_a_decay_that_differs(tmp_path: Path) -> None:
    make = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01)  # noqa: E731
    train_torch(tmp_path / "torch", make=make, schedule=lambda step: 0.9 ** (step - 1))
    named = [("update", 1, "decay_value"), ("update", 1, "schedule")]
    for name, rate, expected in (
        ("factor", lambda t: 0.1 * 0.8**t, named),
        ("another curve", lambda t: 0.1 / (1 + t) ** 0.7, [("hyperparameters", 2, ""), named[0]]),
    ):
        tx = optax.chain(optax.add_decayed_weights(0.02), optax.sgd(rate, momentum=0.9))
        train_jax(tmp_path / name, tx=tx, lr=lambda step, rate=rate: rate(step - 1))
        report = compare_runs(tmp_path / "torch", tmp_path / name)
        assert {*expected} <= {*found(report)}, str(report)


def test_names_that_are_given_count_and_wrong_ones_are_told(torch_run: Path, tmp_path: Path) -> None:
    assert compared(torch_run, tmp_path / "jax", names=NAMES).verdict == "equal"
    report = compare_runs(torch_run, tmp_path / "jax", {**NAMES, "Dense_0": "3"})
    assert report.verdict == "incomplete"
    assert "Dense_0.bias (12,)" in str(report)


def test_a_loop_without_its_gradients_is_compared_as_far(torch_run: Path, tmp_path: Path) -> None:
    report = compared(torch_run, tmp_path / "jax", show=("params",))
    assert report.verdict == "equal", str(report)
    assert {"gradients", "optimizer_state", "clipped_gradients"} <= {*report.unseen}
    update = report.stages["update"]
    assert max(update.residuals) <= 1e-5 < update.allowed < 0.02  # measured: 2e-6
    assert found(compared(torch_run, tmp_path / "other", show=("params",), scale=2.0))[0][:2] == ("local_loss", 1)


@pytest.mark.parametrize("show", ["params", "updates"])
@pytest.mark.parametrize("tx", [adamw(learning_rate=1.1e-2), optax.sgd(1e-2)], ids=["rate", "optimizer"])
def test_updates_without_their_gradients_are_compared_with_torchs(
    show: str, tx: Any, torch_run: Path, tmp_path: Path
) -> None:
    report = compared(torch_run, tmp_path / "jax", tx=tx, show=(show,))
    assert found(report) == [("update", 1, "")], str(report)
    assert "give grads to jax's step" in str(report).replace("\n         ", " ")


@pytest.mark.parametrize("recorded", [[3, 4], [1, 3]], ids=["later", "gap"])
def test_updates_of_steps_that_cannot_be_replayed_are_compared_with_torchs(recorded: list[int], tmp_path: Path) -> None:
    train_torch(tmp_path / "torch", recorded=recorded, make=lambda p: torch.optim.SGD(p, lr=0.1))
    for name, late in (("equal", 0.1), ("late", 0.2)):
        train_jax(
            tmp_path / name, recorded=recorded, tx=optax.sgd(lambda n, late=late: jax.numpy.where(n < 2, 0.1, late))
        )
        report = compare_runs(tmp_path / "torch", tmp_path / name)
        assert found(report) == ([] if name == "equal" else [("update", 3, "")]), str(report)
        assert report.verdict == ("equal" if name == "equal" else "different")


def test_a_loop_that_shows_no_update_is_compared_in_part(torch_run: Path, tmp_path: Path) -> None:
    for show in ((), ("grads",)):
        report = compared(torch_run, tmp_path / str(len(show)), show=show)
        assert report.verdict == "incomplete" and not report.differences
        assert "give updates, or params, to jax's step" in str(report).replace("\n         ", " ")


def test_steps_in_between_are_compared_by_their_numbers(tmp_path: Path) -> None:
    train_torch(tmp_path / "torch", steps=5, recorded=[1, 3, 5])
    train_jax(tmp_path / "jax", steps=5, recorded=[1, 5])
    report = compare_runs(tmp_path / "torch", tmp_path / "jax")
    assert report.verdict == "equal", str(report)
    assert [value == value for value in report.stages["gradients"].residuals] == [True, False, False, False, True]


def test_excerpts_are_compared_as_whole_tensors_are(tmp_path: Path) -> None:
    train_torch(tmp_path / "torch", limit=20)
    train_jax(tmp_path / "jax", limit=20, tx=optax.adamw(1e-2, weight_decay=0.01))
    assert compare_runs(tmp_path / "torch", tmp_path / "jax").verdict == "equal"
    train_jax(tmp_path / "decay", limit=20, tx=optax.adamw(1e-2, weight_decay=0.1))
    assert found(compare_runs(tmp_path / "torch", tmp_path / "decay")) == [("update", 1, "decay_value")]


def test_runs_in_float64_are_judged_as_closely_as_a_check_does(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        train_torch(tmp_path / "torch", dtype="float64")
        train_jax(tmp_path / "jax", dtype="float64")
        report = compare_runs(tmp_path / "torch", tmp_path / "jax")
        assert report.verdict == "equal", str(report)
        assert report.dtype == "float64" and report.stages["update"].allowed < 1e-12
        train_jax(tmp_path / "gelu", dtype="float64", approximate=True)
        assert found(compare_runs(tmp_path / "torch", tmp_path / "gelu"))[0] == ("local_loss", 1, "")


def judged(*residuals: float) -> RecordedJudgement:
    judgement = RecordedJudgement([*range(1, len(residuals) + 1)])
    for index, residual in enumerate(residuals):
        judgement.note("gradients", index, {"w": residual}, 1e-4, True)
    return judgement


def test_a_difference_of_a_single_step_is_rounding_and_one_of_most_steps_or_a_large_one_is_not() -> None:
    tipped = judged(1e-6, 2e-6, 2e-3, 2e-6, 3e-6)
    assert not tipped.first and tipped.tipped["gradients"].step == 3
    for residuals in ([2e-3] * 4, [1e-6, 2e-3, 2e-3, 2e-3], [1e-6, 1e-6, 0.3, 1e-6, 1e-6], [9e-5, 2e-4, 9e-5, 8e-5]):
        assert judged(*residuals).first["gradients"].step == next(
            step for step, residual in enumerate(residuals, start=1) if residual > 1e-4
        )


@pytest.mark.parametrize("limit", [20, 2**14], ids=["excerpts", "whole"])
def test_an_optimizer_of_whole_tensors_is_replayed_if_they_are_recorded(limit: int, tmp_path: Path) -> None:
    train_torch(tmp_path / "torch", make=lambda p: torch.optim.Adafactor(p, lr=1e-2), limit=limit)
    for rate in (1e-2, 2e-2):
        train_jax(tmp_path / f"{rate}", tx=adafactor(rate), limit=limit)
        report = compare_runs(tmp_path / "torch", tmp_path / f"{rate}")
        assert report.verdict == ("equal" if rate == 1e-2 else "different"), str(report)
        assert ("Adafactor cannot be replayed" in str(report)) == (limit == 20 and rate == 1e-2)


@pytest.mark.large
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_thousand_steps_in_float32_are_equal_and_say_what_was_left_out(clip: float | None, tmp_path: Path) -> None:
    recorded = [1, 2, 3, 500, 1000]
    train_torch(tmp_path / "torch", steps=1000, recorded=recorded, clip=clip)
    tx = optax.adamw(1e-2, weight_decay=0.01)
    train_jax(tmp_path / "jax", steps=1000, recorded=recorded, tx=tx if clip is None else clipped(tx, clip))
    report = compare_runs(tmp_path / "torch", tmp_path / "jax")
    assert report.verdict == "equal", str(report)
    assert {"params"} <= {stage for part in report.left_out for stage in part.stages}
    assert "Not all steps from 1 on are recorded, so from step 500 on" in " ".join(str(report).split())


def test_recordings_of_other_lengths_are_compared_as_far_and_say_so(tmp_path: Path) -> None:
    train_torch(tmp_path / "torch", steps=4, recorded=4)
    train_jax(tmp_path / "jax", steps=4, recorded=3)
    report = compare_runs(tmp_path / "torch", tmp_path / "jax")
    assert report.verdict == "equal" and report.steps == 3, str(report)
    assert "Torch recorded steps 1 to 4, jax steps 1 to 3." in " ".join(str(report).split())
    lines = tmp_path / "torch" / "rank0" / "run.jsonl"
    lines.write_text(lines.read_text()[:-9])
    says = " ".join(str(compare_runs(tmp_path / "torch", tmp_path / "jax")).split())
    assert "The recording of torch ends within step 4." in says
