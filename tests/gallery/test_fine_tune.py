"""The fine-tune in both frameworks: what it claims, the files that it reads, and the full size."""

import dataclasses
from typing import Any

import pytest

from examples.fine_tune import __main__ as program
from examples.fine_tune import claims, in_jax, in_torch, material
from examples.fine_tune.job import Job, Run
from examples.fine_tune.options import Options
from jaxddp import Replicas, prepare

OPTIONS = Options(epochs=2, devices=2, platform="cpu", dtype="bfloat16")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The proof and the fine-tune, of one layer, and the model's sizes."""
    folder = tmp_path_factory.mktemp("fine_tune")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(material, "SMALL", dataclasses.replace(material.SMALL, num_hidden_layers=1))
        config = material.put(OPTIONS, folder)
    sizes = material.sizes(config)
    return config, [Job(sizes, str(folder), "float64", 10, whole=True), Job(sizes, str(folder), "bfloat16")]


@pytest.fixture(scope="module")
def in_both(jobs: Any) -> tuple[list[Run], list[Run]]:
    config, todo = jobs
    replicas = Replicas(prepare(2, "cpu"))
    ours = [in_jax.run(OPTIONS.training(), config, job, replicas) for job in todo]
    return ours, in_torch.run(OPTIONS.training(), todo)


def test_in_float64_both_make_the_same_steps(in_both: Any) -> None:
    (ours, _), (theirs, _) = in_both
    found = claims.proof(ours, theirs)
    assert len(found) == 5 and all(claim.holds for claim in found), found


def test_in_bfloat16_it_learns_and_rounds_as_transformers(in_both: Any) -> None:
    ours, theirs = in_both
    fine_tuned = ours[1], theirs[1]
    assert claims.rounding("bfloat16", *fine_tuned, theirs[0]).holds
    falls, right = claims.learning("bfloat16", 0.5, *fine_tuned)
    assert falls.holds, falls
    assert isinstance(right.jax, float) and 0 < right.jax < 1  # two epochs are too few to get them right


def test_losses_stand_beside_each_other(in_both: Any, jobs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (ours, _), (theirs, _) = in_both
    program.show(jobs[1][0], ours, theirs)
    first = capsys.readouterr().out.splitlines()[1].split()
    assert first[:2] == ["step", "1"] and first[2] == first[3] == f"{ours.losses[0]:.10f}"
