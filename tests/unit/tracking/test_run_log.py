"""Run log: console output, files in the run folder, and files after a killed and resumed run."""

import io
import itertools
import json
import shutil
import sys

import numpy as np
import pytest

from jaxddp.config import TrainConfig, TrainerConfig
from jaxddp.errors import TrainingError
from jaxddp.tracking import run_log
from jaxddp.tracking.console import Console
from jaxddp.tracking.gradient_metrics import LOG2_BINS
from jaxddp.tracking.metrics_file import read_metrics
from jaxddp.tracking.run_folder import load_config
from jaxddp.tracking.run_log import RunLog
from tests.support.run_logs import CONFIG, SIX_STEPS, claimed_log, open_log, places, train, write_run


def test_lines_are_aligned_and_on_stdout_only(capsys):
    with open_log(None) as log:
        metrics = {"loss": 0.1234564, "accuracy": 0.97123}
        log.step(1, 3, metrics, examples=32)
        log.epoch(60, 3, metrics, {"loss": 0.23456749, "accuracy": 0.9694}, examples_per_second=12345.4)
        log.epoch(200, 10, metrics, {}, examples_per_second=123456)
        speed = ["12,345 examples/s   the step limits"]
        log.summary({"loss": 0.2, "accuracy": 0.98056}, 11.34, "replicas identical", "2 skipped", speed=speed)
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "a test",
        "epoch  3/10  train loss 0.123456  accuracy 0.9712  test loss 0.234567  accuracy 0.9694   12,345 examples/s",
        "epoch 10/10  train loss 0.123456  accuracy 0.9712  123,456 examples/s",
        *speed,
        "test accuracy 0.9806   11.3 s   replicas identical   2 skipped",
    ]
    assert err == ""


def test_the_summary_names_the_run_folder_which_has_no_curves_without_steps(tmp_path, capsys):
    with claimed_log(tmp_path / "run") as log:
        log.summary({"loss": 0.5}, 1)
    *_, result, place = capsys.readouterr().out.splitlines()
    assert result == "test loss 0.500000   1.0 s"
    assert place == f"saved to {tmp_path / 'run'}"
    assert not (tmp_path / "run" / "curves.png").exists()


def test_the_last_line_says_whose_metrics_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(TrainerConfig(), None, title="demo", examples_per_epoch=64) as log:
        log.summary({"loss": 0.5}, 1, split="train")
    assert capsys.readouterr().out.splitlines()[-1] == "train loss 0.500000   1.0 s"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("quiet", [False, True])
def test_the_progress_bar_is_shown_only_on_terminals(monkeypatch, capsys, quiet):
    terminal, now = Terminal(), itertools.count(step=0.08)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("tqdm.std.time", lambda: next(now))  # tqdm draws a bar at most every 0.1 s
    with open_log(None, quiet=quiet, memory=lambda: 1_234_000_000) as log:
        for epoch in (1, 2):
            log.step(epoch, epoch, {"loss": 0.5, "accuracy": 0.25}, examples=64)
            log.epoch(epoch, epoch, {"loss": 0.5}, {}, examples_per_second=1)
        log.step(3, 3, {"loss": 0.25, "accuracy": 0.5}, examples=64)
    if quiet:
        assert terminal.getvalue() == capsys.readouterr().out == ""
    else:
        shown = [line.strip() for line in terminal.getvalue().split("\r")]
        assert any(line.startswith("epoch  3/10  loss 0.250000  accuracy 0.5000 |███████▏ ") for line in shown)
        assert any(" left, " in line and line.endswith(", 1.23 GB") for line in shown)
        assert shown[-1] == ""  # the bar is gone
        assert [line[:11] for line in capsys.readouterr().out.splitlines()[1:]] == ["epoch  1/10", "epoch  2/10"]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_a_line_comes_every_30_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    console = Console(2, 800, quiet=False, clock=clock)
    for step in range(1, 101):
        clock.now = 1.0 * step
        console.advance(step, 200, 1 + step // 101, {"loss": 0.5}, 8)
    console.print("epoch 1/2")
    clock.now += 29.5
    console.waiting("the test after step 100", 29.5)
    clock.now += 0.5
    console.waiting("the test after step 100", 30.0)
    console.waiting("the test after step 100", 30.0)
    assert capsys.readouterr().out.splitlines() == [
        "epoch 1/2  loss 0.500000  step 30 of 200  02:50 left",
        "epoch 1/2  loss 0.500000  step 60 of 200  02:20 left",
        "epoch 1/2  loss 0.500000  step 90 of 200  01:50 left",
        "epoch 1/2",
        "the test after step 100: 30 s so far",
    ]
    quiet = Console(2, 800, quiet=True, clock=clock)
    clock.now += 99
    quiet.advance(1, 200, 1, {"loss": 0.5}, 8)
    quiet.waiting("step 2", 99)
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_the_bar_does_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    clock = Clock()
    console = Console(2, 800, quiet=False, clock=clock)
    for step in (1, 2):
        clock.now += 99
        console.advance(step, 200, 1, {"loss": 0.5}, 8)
        console.waiting(f"step {step}", 99)
    console.close()
    assert capsys.readouterr().out == ""


def test_metrics_are_strict_json_and_a_nan_raises_no_warning(tmp_path, caplog):
    with claimed_log(tmp_path / "run") as log:
        log.step(1, 1, {"loss": float("nan"), "accuracy": np.float32(0.5)}, examples=32)
        log.epoch(1, 1, {"loss": float("inf")}, {"loss": np.float64(0.25)}, examples_per_second=100)
        text = (tmp_path / "run" / "metrics.jsonl").read_text()  # written before the run ends

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    assert [json.loads(line, parse_constant=refuse) for line in text.splitlines()] == [
        {"kind": "step", "step": 1, "epoch": 1, "examples": 32, "loss": None, "accuracy": 0.5},
        {"kind": "epoch", "step": 1, "epoch": 1, "train_loss": None, "test_loss": 0.25, "examples_per_second": 100.0},
    ]
    assert (tmp_path / "run" / "curves.png").is_file() and caplog.records == []


def test_a_run_folder_has_config_curves_metrics_and_tensorboard(tmp_path):
    write_run(tmp_path / "run", 2)
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == [".lock", "config.json", "curves.png", "metrics.jsonl", "tensorboard"]
    assert load_config(tmp_path / "run", TrainConfig) == CONFIG


def test_a_failed_run_keeps_its_history_and_its_error(tmp_path, monkeypatch):
    with pytest.raises(TrainingError, match="loss is nan"), claimed_log(tmp_path / "a") as log:
        train(log, 1, 3)
        raise TrainingError("loss is nan")
    assert places(read_metrics(tmp_path / "a" / "metrics.jsonl")) == SIX_STEPS[:4]
    assert (tmp_path / "a" / "curves.png").is_file()

    monkeypatch.setattr(run_log, "draw_curves", lambda history, title: 1 / 0)
    with pytest.raises(TrainingError, match="loss is nan"), claimed_log(tmp_path / "b") as log:
        train(log, 1, 3)
        raise TrainingError("loss is nan")
    with pytest.raises(ZeroDivisionError):
        write_run(tmp_path / "c", 2)


CALLS = {
    "step": lambda log: log.step(3, 2, {"loss": 0.5}, examples=32),
    "epoch": lambda log: log.epoch(3, 2, {"loss": 0.5}, {}, 100),
    "histograms": lambda log: log.histograms(3, {"fc": [1] * len(LOG2_BINS)}),
    "sync": RunLog.sync,
    "summary": lambda log: log.summary({"loss": 0.5}, 1),
    "exit": lambda log: None,
}


@pytest.mark.parametrize(
    ("what", "call"),
    [*(("moved", call) for call in CALLS), ("removed", "step"), ("metrics removed", "step"), ("parent moved", "step")]
    + [("replaced", "step"), ("replaced", "exit")],
)
def test_a_run_folder_that_is_moved_or_removed_ends_the_run_at_the_next_write(tmp_path, capsys, what, call):
    run, other = tmp_path / "runs" / "a", tmp_path / "b"
    other.mkdir()
    for name in ("curves.png", "metrics.jsonl"):
        (other / name).write_text("of another run")

    def lose():
        if what == "parent moved":
            run.parent.rename(tmp_path / "later")
        elif what == "metrics removed":
            (run / "metrics.jsonl").unlink()
        else:
            shutil.rmtree(run) if what == "removed" else run.rename(tmp_path / "moved")
            if what == "replaced":
                other.rename(run)

    path = run / "metrics.jsonl" if what == "metrics removed" else run
    now = {"moved": "moved", "replaced": "moved", "parent moved": "later/a"}.get(what)
    fate = (
        f"moved to {tmp_path}/{now} during the run; continue there with --resume" if now else "moved or removed during"
    )
    with pytest.raises(TrainingError, match=rf"^{path}: was {fate}"), claimed_log(run) as log:
        train(log, 1, 2)
        lose()
        CALLS[call](log)
    assert "saved to" not in capsys.readouterr().out.rpartition("a test")[2]
    if what == "replaced":  # by another run, whose files stay as they were
        assert {path.read_text() for path in run.iterdir()} == {"of another run"}
