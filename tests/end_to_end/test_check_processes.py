"""A check whose jax side is two processes says what it says with one."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxddp.parity.cases.builtin import make_case
from jaxddp.parity.checking import check
from jaxddp.parity.jax_side.child import Micro, jax_records
from jaxddp.parity.records import Scratch
from jaxddp.parity.report.sentences import sentences
from jaxddp.parity.runs import Runs
from jaxddp.parity.workers import Workers
from tests.support.checks import Checked, checker
from tests.support.small_port import Change, at_start_of, step, wide

WORLD_SIZE = 4
MEAN = 'jax.lax.pmean(local, "replica")'
OF_A_PROCESS = "assert jax.process_index() != 1, 'only here'"


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    with Workers(WORLD_SIZE, processes=2) as workers:
        yield workers


@pytest.fixture
def of_two(tmp_path: Path, two: Workers) -> Checked:
    return checker(tmp_path, two, WORLD_SIZE)


@pytest.fixture
def of_one(tmp_path: Path, workers: Workers) -> Checked:
    return checker(tmp_path, workers, WORLD_SIZE)


@pytest.mark.large
@pytest.mark.parametrize(
    "changes", [[], [(MEAN, 'jax.lax.psum(local, "replica")')], [(MEAN, "local")]], ids=["right", "sum", "no mean"]
)
def test_the_report_is_that_of_one_process(changes: list[Change], of_two: Checked, of_one: Checked) -> None:
    reports = [checked(more=step(*changes)) for checked in (of_two, of_one)]
    ours, theirs = reports
    assert ours.verdict == theirs.verdict == ("different" if changes else "equal"), str(ours)
    of_both = [[(one.stage, one.step, one.cause and sentences(one.cause)) for one in r.differences] for r in reports]
    assert of_both[0] == of_both[1]
    assert ours.stages.keys() == theirs.stages.keys()
    # Of the first step: replicas that drift apart go on from another one's parameters in each process.
    assert ours.losses[0] == pytest.approx(theirs.losses[0], rel=1e-14)  # measured: 2e-16


@pytest.mark.large
def test_a_port_with_excerpts_is_equal(of_two: Checked) -> None:
    assert of_two(*wide(400)).verdict == "equal"


@pytest.mark.large
def test_micro_batches_have_the_gradients_of_one_process(two: Workers, workers: Workers) -> None:
    case = make_case("mlp", "sgd", WORLD_SIZE, 2, accumulation_steps=3, global_batch_size=48)
    records, kept = [], []
    for crew in (two, workers):
        runs, scratch = Runs(case, crew), Scratch()
        runs.in_float64()
        evidence = runs.evidence()
        crew.jax.do(Micro(evidence.case, evidence.start, evidence.torch_folder, scratch.path, (0, 1)))
        records.append(jax_records(scratch.path))
        kept.append(scratch)
        assert not [*scratch.path.parent.glob("jax process*")]  # nothing is left outside of the scratch folder
    for ours, theirs in zip(*records, strict=True):
        assert ours["counts"]["counts"].tolist() == theirs["counts"]["counts"].tolist()
        assert ours["counts"]["counts"].shape == (WORLD_SIZE, 3)
        assert ours.keys() == theirs.keys() >= {"sums"}
        for stage in theirs.keys() - {"counts"}:
            assert theirs[stage].keys() == ours[stage].keys()
            for name, x in theirs[stage].items():
                scale = np.linalg.norm(x)
                assert np.linalg.norm(ours[stage][name] - x) <= 1e-14 * scale, name  # measured: 0


@pytest.mark.large
def test_an_error_in_one_process_ends_the_check_and_the_next_one_runs(of_two: Checked) -> None:
    began = time.monotonic()
    report = of_two(at_start_of("jax_loss(model, batch)", f"import jax; {OF_A_PROCESS}"), more=step())
    assert report.verdict == "incomplete"
    assert any("only here" in problem.message for problem in report.problems), report.problems
    assert time.monotonic() - began < 60
    assert of_two(more=step()).verdict == "equal"


def test_processes_that_do_not_divide_a_world_are_told(two: Workers) -> None:
    report = check(make_case("mlp", "sgd", 3, 2, global_batch_size=48), workers=two, numerics=False)
    assert [problem.message for problem in report.problems] == ["--num-processes 2: must divide the world size 3"]
