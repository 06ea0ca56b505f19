"""A soak counts what a kill costs, starts the job again, and tells levels."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import soak
from benchmarks.soak import SoakOptions
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


@pytest.mark.large
def test_a_kill_costs_the_steps_since_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "LOOK_EVERY", 0.02)
    monkeypatch.setattr(soak, "command", lambda run, every: [sys.executable, "-c", TRAINS, str(run)])
    seen = soak.soak(SoakOptions(minutes=0.12, kill_every=3.0), tmp_path / "job")
    ends = seen["ends"]
    assert len(ends) >= 2
    assert {(end["signal"], end["exit_code"]) for end in ends} <= {("SIGKILL", -9), ("SIGTERM", -15)}
    assert all(0 <= end["reached"] - end["saved"] < 110 for end in ends)  # it went on between a look and the kill
    assert max(end["reached"] - end["saved"] for end in ends) > 0
    assert seen["logged_once"]
    assert all(seen["samples"][-1][name] > 0 for name in ("memory, MiB", "open files", "threads"))
    rows = dict(line.strip("| ").split(" | ") for line in soak.to_markdown(seen).splitlines()[2:])
    assert rows["steps"] == f"{seen['steps']:,}"
    assert rows["damaged checkpoints"] == "0"


def test_a_log_with_a_step_twice_is_told(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"kind": "step", "step": 1}\n{"kind": "epoch", "step": 1}\n{"kind": "st')
    assert soak.logged(tmp_path) == [1]
    log.write_text(log.read_text() + '\n{"kind": "step", "step": 1}\n')
    assert soak.logged(tmp_path) == [1, 1]
    assert not soak.soak(SoakOptions(minutes=0), tmp_path)["logged_once"]


def test_a_folder_that_exists_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="exists; must be a new folder"):
        soak.main(SoakOptions(output=str(tmp_path)))


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
    counted = soak.sample(os.getpid(), tmp_path)
    assert (counted["files of checkpoints"], counted["checkpoints, kB"]) == (1, 0.005)


@pytest.mark.large
def test_a_job_trains_under_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "soak"
    soak.main(SoakOptions(minutes=2, kill_every=60.0, checkpoint_every=4.0, output=str(output)))
    rows = dict(line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:])
    assert int(rows["steps"].replace(",", "")) > 0
    assert (rows["damaged checkpoints"], rows["starts that came no further"]) == ("0", "0")
    assert json.loads((output / "soak.json").read_text())["logged_once"]
