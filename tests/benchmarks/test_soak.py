"""A soak counts what a kill costs, starts jobs again, and tells levels."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak import jobs, torch_job, watched
from benchmarks.soak.__main__ import SoakOptions, kills, main
from benchmarks.soak.jobs import JaxddpJob, TorchDDPJob
from benchmarks.soak.report import lost, to_markdown
from benchmarks.soak.resources import sample
from benchmarks.soak.watched import WatchedJob
from jaxddp.errors import InputError

# Takes a step per 10 ms and saves every 100 steps; a resumed one drops later lines, as jaxddp's log does.
TRAINS = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
checkpoints, log = folder / "checkpoints", folder / "metrics.jsonl"
checkpoints.mkdir(parents=True, exist_ok=True)
step = max((int(path.name) for path in checkpoints.iterdir()), default=0)
lines = log.read_text().splitlines(True) if log.exists() else []
log.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
while True:
    step += 1
    with log.open("a") as file:
        file.write(json.dumps({"kind": "step", "step": step}) + "\\n")
    if step % 100 == 0:
        (checkpoints / str(step)).mkdir()
    time.sleep(0.01)
"""


class Counting(JaxddpJob):
    """SoakJob that only counts."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", TRAINS, str(self.folder)]


def until(condition, one: WatchedJob) -> None:
    """Look at a job until a condition holds, for a minute at most."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        one.keep_running()
        one.look(time.monotonic())
        time.sleep(0.02)


def test_a_kill_costs_the_steps_since_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "FURTHER", 20)
    one = WatchedJob(Counting(tmp_path / "job", 1.0), seed=0)
    try:
        until(lambda: one.job.reached() >= 150, one)
        one.kill(signal.SIGKILL, time.monotonic())
        until(lambda: one.kills[0].recovery is not None, one)
    finally:
        one.end()
    (kill,) = one.kills
    assert kill.resumed == 100
    assert 50 <= kill.reached - 100 < 100
    record = one.record()
    assert lost(record) == [kill.reached - 100]
    assert (record["starts"], record["exit_codes"], record["written_once"]) == (2, {-9: 1}, True)
    assert all(one.samples[-1][name] > 0 for name in ("mebibytes", "files", "threads", "log_bytes"))
    text = to_markdown({"counting": record})
    assert "| kills | 1 (1 SIGKILL) |" in text
    assert "| starts, exit codes | 2, 1 x -9 |" in text
    assert f"| steps lost by a kill | median {kill.reached - 100}, at most {kill.reached - 100} |" in text


def test_a_log_with_a_step_twice_is_told(tmp_path: Path) -> None:
    job = JaxddpJob(tmp_path, 1.0)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1}\n{"kind": "epoch", "step": 1}\n{"kind": "st')
    one = WatchedJob(job, 0)
    assert (job.steps(), one.record()["written_once"]) == ([1], True)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('\n{"kind": "step", "step": 1}\n')
    assert (job.steps(), one.record()["written_once"]) == ([1, 1], False)


def test_only_a_checkpoint_of_torch_with_metadata_counts(tmp_path: Path) -> None:
    for step in (50, 100, 150):
        (tmp_path / f"{step:09d}").mkdir()
        (tmp_path / f"{step:09d}" / "__0_0.distcp").touch()
    for step in (50, 100):
        (tmp_path / f"{step:09d}" / ".metadata").touch()
    assert TorchDDPJob(tmp_path, 1.0).saved() == 100
    assert [path.name for path in torch_job.complete(tmp_path)] == ["000000050", "000000100"]


def test_both_jobs_log_the_same_steps() -> None:
    assert jobs.LOG_EVERY == torch_job.LOG_EVERY


def test_the_kills_come_from_the_seed() -> None:
    first, same, other = ([*kills(SoakOptions(minutes=30, seed=seed))] for seed in (0, 0, 1))
    assert first == same != other


def test_a_folder_that_exists_and_an_unknown_job_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="exists; must be a new folder"):
        main(SoakOptions(output=str(tmp_path)))
    with pytest.raises(InputError, match="--jobs jax: unknown; did you mean jaxddp"):
        main(SoakOptions(jobs=("jax",)))


def test_a_checkpoint_that_is_renamed_while_files_are_counted_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("30", "60.orbax-checkpoint-tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "state").write_bytes(b"12345")
    scandir = os.scandir

    def renamed(place: Any) -> Any:
        if os.fspath(place).endswith("-tmp"):
            raise FileNotFoundError(place)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", renamed)
    counted = sample(os.getpid(), tmp_path, 1.0)
    assert (counted["checkpoint_files"], counted["checkpoint_bytes"], counted["log_bytes"]) == (1, 5, 0)


@pytest.mark.large
@pytest.mark.parametrize("name", ["jaxddp", "torch"])
def test_jobs_train_under_kills(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"minutes": 1.5, "kill_every": 40.0, "checkpoint_every": 4.0, "jobs": (name,)}
    main(SoakOptions(output=str(tmp_path / "soak"), **options))  # type: ignore[arg-type]
    rows = dict(line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:])
    assert int(rows["steps"].replace(",", "")) > 0
    assert rows["damaged checkpoints"] == "0"
    assert rows["kills from which it did not recover"] == "0"
