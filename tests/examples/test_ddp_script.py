"""DDP script example: both scripts do the same, and claims fail for planted mistakes."""

import subprocess
import sys
from dataclasses import replace

import pytest

from examples.claims import Claim
from examples.ddp_script import measure, script_jax, script_torch
from examples.ddp_script.problem import Run, Settings
from jaxddp.errors import InputError

pytestmark = pytest.mark.large

SETTINGS = Settings(dtype="float64")


def hold(claims: list[Claim]) -> list[bool]:
    return [claim.holds for claim in claims]


@pytest.fixture(scope="module")
def ours() -> Run:
    return script_jax.run(SETTINGS)


@pytest.fixture(scope="module")
def theirs() -> Run:
    return script_torch.run(SETTINGS)


def test_claims_fail_for_another_learning_rate(theirs: Run) -> None:
    other = script_jax.run(replace(SETTINGS, lr=0.5 + 1e-9))
    assert hold(measure.of_runs(other, theirs)) == [True, False, False]


def test_claims_fail_for_another_order_of_the_rows(ours: Run, theirs: Run) -> None:
    other = replace(ours, lines=[replace(line, rows=line.rows[::-1]) for line in ours.lines])
    assert hold(measure.of_runs(other, theirs)) == [False, True, True]


def test_rows_trained_on_and_counted_are_as_claimed(ours: Run, theirs: Run) -> None:
    assert all(hold(measure.of_rows(ours, theirs, SETTINGS)))
    assert all(hold(measure.of_accuracy(ours, theirs)))
    assert len({accuracy.right / accuracy.counted for accuracy in (ours.train, *ours.by_loader.values())}) == 3


def test_without_drop_last_all_rows_are_trained_on(theirs: Run) -> None:
    every = script_jax.run(replace(SETTINGS, drop_last=False, epochs=1))
    assert {row for line in every.lines for row in line.rows} == {0, 1, 2, 3, 4}
    assert [len(line.rows) for line in every.lines] == [2, 2, 1, 1]
    assert hold(measure.of_rows(every, theirs, SETTINGS)) == [True, False]


def test_no_process_is_left_behind(ours: Run, theirs: Run) -> None:
    assert all(hold(measure.of_processes(ours, theirs)))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as one:
        assert hold(measure.of_processes(ours, replace(theirs, processes={one.pid}))) == [True, False]
        one.communicate(b"\n")


def test_bad_flags_are_one_line() -> None:
    with pytest.raises(InputError, match="--batch-size 0: must be at least 1"):
        Settings(batch_size=0)
    with pytest.raises(InputError, match="--platform tpu: unknown"):
        Settings(platform="tpu")
