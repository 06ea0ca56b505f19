"""Runs of `jaxddp.train` that end early: what a signal or damage leaves, and how the run goes on from it."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxddp.checkpoint import Checkpoints
from jaxddp.errors import InputError, TrainingError
from jaxddp.signals import Interruption
from jaxddp.state import TrainState
from jaxddp.train import tester
from tests.support.train_runs import SMALL, check_same_weights, epochs, records, saved_steps, train

STATEFUL = ["--ema-decay", "0.9", "--dropout", "0.3", "--log-gradients", "*"]
SCALED = ["--amp", "fp16", "--init-scale", "1e12", "--growth-interval", "5"]
SHARDED = ["--shard-optimizer", "--comm-hook", "powerSGD", "--start-power-sgd-iter", "2"]


def train_until(dispatch: int, *flags: str, number: signal.Signals = signal.SIGTERM) -> None:
    """Train, with a signal that comes during the dispatch of this number."""
    count = itertools.count(1)

    def listen(interruption: Interruption) -> None:
        if next(count) == dispatch:
            interruption.signal = number

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Interruption, "listen", listen)
        with pytest.raises(SystemExit) as stopped:
            train(*flags)
    assert stopped.value.code == (130 if number == signal.SIGINT else 75)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("stops", [[7], [3, 17], [12, 13]], ids=str)
@pytest.mark.parametrize("flags", [STATEFUL, SCALED, SHARDED], ids=lambda flags: flags[0])
def test_a_run_that_stops_within_an_epoch_goes_on_bit_for_bit(
    flags: list[str], stops: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*flags, "--devices", "2", "--steps-per-dispatch", "1", "--epochs", "2"]
    train(*flags, "--output", str(tmp_path / "whole"))
    train_until(stops[0], *flags, "--output", str(tmp_path / "parts"))
    for before, stop in itertools.pairwise(stops):
        train_until(stop - before, "--resume", str(tmp_path / "parts"))
    line = f"SIGTERM: saved the checkpoint of step {stops[-1]}; continue with --resume {tmp_path / 'parts'}\n"
    assert capsys.readouterr().err.endswith(line)
    train("--resume", str(tmp_path / "parts"))
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    check_same_weights(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.large
def test_dispatches_of_several_steps_change_nothing_when_a_run_goes_on(tmp_path: Path) -> None:
    """Dispatches of 5 steps end at steps 5, 10 and 11 (12 with the smaller batch); the run stops at 5."""
    flags = [*STATEFUL, "--devices", "2", "--steps-per-dispatch", "5", "--epochs", "2"]
    train(*flags, "--output", str(tmp_path / "whole"))
    train_until(1, *flags, "--output", str(tmp_path / "parts"))
    assert saved_steps(tmp_path / "parts") == [5]
    train("--resume", str(tmp_path / "parts"))
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    check_same_weights(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.large
def test_a_run_goes_on_within_an_epoch_on_other_devices_equal_to_rounding(tmp_path: Path) -> None:
    flags = ["--dataset", "linear", "--num-examples", "1024", "--dtype", "float64", "--epochs", "2"]
    flags += ["--steps-per-dispatch", "1", "--devices", "2"]
    train(*flags, "--output", str(tmp_path / "whole"))
    train_until(3, *flags, "--output", str(tmp_path / "parts"))
    train("--resume", str(tmp_path / "parts"), "--devices", "8")
    whole, parts = records(tmp_path / "whole"), records(tmp_path / "parts")
    assert [record["step"] for record in whole] == [record["step"] for record in parts]
    for one, other in zip(whole, parts, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"kind"}:
            assert abs(one[name] - other[name]) < 1e-12, name  # [1e-15]


def test_a_signal_during_the_test_after_an_epoch_of_one_step_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_epoch = tester.Tester.after_epoch

    def signalled(of_run: tester.Tester, state: TrainState, epoch: int, *means: Any) -> Any:
        if epoch == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return after_epoch(of_run, state, epoch, *means)

    def fail(*_: Any) -> None:
        raise AssertionError("the run does not listen yet")

    monkeypatch.setattr(tester.Tester, "after_epoch", signalled)
    before = signal.signal(signal.SIGTERM, fail)
    try:
        with pytest.raises(SystemExit) as stopped:
            train("--epochs", "9", "--global-batch-size", "1438", "--output", str(tmp_path / "run"))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped.value.code == 75
    assert saved_steps(tmp_path / "run")


def test_records_are_on_the_disk_before_the_checkpoint_of_their_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep, through a loss of power, records that no resumed run repeats."""
    told: list[tuple[str, int]] = []
    sync, save = os.fsync, Checkpoints.save

    def record_sync(descriptor: int) -> None:
        path = Path("/proc/self/fd", str(descriptor)).readlink()
        if path.name == "metrics.jsonl" and (lines := path.read_text().splitlines()):
            told.append(("records", json.loads(lines[-1])["step"]))
        sync(descriptor)

    def record_save(checkpoints: Checkpoints, state: TrainState, notes: Any) -> None:
        told.append(("checkpoint", int(state.step)))
        save(checkpoints, state, notes)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Checkpoints, "save", record_save)
    flags = ["--epochs", "2", "--steps-per-dispatch", "1", "--checkpoint-every", "5steps", "--keep-checkpoints", "4"]
    train(*flags, "--output", str(tmp_path / "run"))
    assert saved_steps(tmp_path / "run") == [10, 15, 20, 24]
    assert told == [(kind, step) for step in (5, 10, 15, 20, 24) for kind in ("records", "checkpoint")]


@pytest.mark.large
def test_checkpoints_come_by_the_clock(tmp_path: Path) -> None:
    """Every step takes longer than 60 microseconds."""
    flags = ["--epochs", "1", "--steps-per-dispatch", "1", "--keep-checkpoints", "99"]
    train(*flags, "--checkpoint-every", "0.000001minutes", "--output", str(tmp_path / "often"))
    assert saved_steps(tmp_path / "often") == list(range(1, 13))
    train(*flags, "--checkpoint-every", "10minutes", "--output", str(tmp_path / "seldom"))
    assert saved_steps(tmp_path / "seldom") == [12]


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    flags = ["--checkpoint-every", "1", "--keep-checkpoints", "1", "--keep-best"]
    train(*flags, "--epochs", "2", "--output", str(tmp_path / "run"))
    train("--lr", "1", "--epochs", "4", "--resume", str(tmp_path / "run"))
    losses = [record["test_loss"] for record in epochs(tmp_path / "run")]
    assert losses.index(min(losses)) == 1
    assert saved_steps(tmp_path / "run") == [24, 48]


def test_fewer_epochs_than_are_done_are_refused(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    train_until(27, "--epochs", "4", "--steps-per-dispatch", "1", "--output", run)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    for few in ("1", "2"):
        with pytest.raises(
            InputError, match=rf"^--epochs {few}: the run in .*run has done 2 epochs and 3 steps already"
        ):
            train("--epochs", few, "--resume", run)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    train("--epochs", "3", "--resume", run)
    with pytest.raises(InputError, match=r"^--epochs 2: the run in .*run has done 3 epochs already$"):
        train("--epochs", "2", "--resume", run)


def test_a_run_whose_checkpoints_are_missing_is_refused_and_keeps_its_metrics(tmp_path: Path) -> None:
    train("--epochs", "1", "--output", str(tmp_path / "run"))
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(InputError, match=r"^--resume .*run: its metrics reach step 12, but checkpoints/ is missing; "):
        train("--epochs", "2", "--resume", str(tmp_path / "run"))
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_after_a_nan_a_damaged_checkpoint_is_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxddp.checkpoint import Checkpoints

    intact = Checkpoints.newest_intact

    def newest_intact(checkpoints: Checkpoints) -> int | None:
        (tmp_path / "run" / "checkpoints" / "24" / "record" / "record.json").unlink()
        return intact(checkpoints)

    monkeypatch.setattr(Checkpoints, "newest_intact", newest_intact)
    flags = ["--optimizer", "sgd", "--momentum", "0.9", "--lr", "0.05", "--checkpoint-every", "1"]
    train(*flags, "--epochs", "2", "--output", str(tmp_path / "run"))
    with pytest.raises(TrainingError, match=r"loss is (nan|inf) at step \d+.*last good checkpoint is of step 12; "):
        train("--lr", "1e30", "--epochs", "3", "--resume", str(tmp_path / "run"))


# ---- signals to a process

SLOW_SAVES = """
import sys, time
from jaxddp.checkpoint.record import RecordHandler
from jaxddp.train.command import run
RecordHandler.save = lambda *arguments: time.sleep(600)
run(sys.argv[1:])
"""


@contextlib.contextmanager
def running(*flags: str, program: tuple[str, ...] = ("-m", "jaxddp.train")) -> Iterator[subprocess.Popen[str]]:
    """Start a long run in a process of its own, and wait for its first epoch."""
    common = [*SMALL, "--devices", "2", "--epochs", "100000", "--checkpoint-every", "0", "--log-every", "1"]
    command = [sys.executable, *program, *common, *flags]
    # Background jobs of a shell ignore SIGINT, those of nohup SIGHUP, and so would what they start.
    heard = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in heard.items()}
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    with process:
        try:
            assert process.stdout is not None
            assert any(line.startswith("epoch") for line in process.stdout)
            yield process
        finally:
            process.kill()


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGHUP, 75), (signal.SIGUSR1, 75)]
)
def test_a_signal_saves_a_checkpoint_from_which_the_run_goes_on(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with running(*STATEFUL[:4], "--output", str(folder)) as process:
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
    assert process.returncode == code
    [step] = saved_steps(folder)
    assert told.splitlines() == [
        f"{number.name}: saving a checkpoint after this step; a second signal ends the run at once",
        f"{number.name}: saved the checkpoint of step {step}; continue with --resume {folder}",
    ]
    goal = ["--epochs", str(step // 12 + 1)]
    train(*goal, "--resume", str(folder))
    train(*STATEFUL[:4], *goal, "--devices", "2", "--output", str(tmp_path / "whole"))
    assert records(folder) == records(tmp_path / "whole")
    check_same_weights(tmp_path / "whole", folder)


@pytest.mark.large
def test_a_signal_saves_a_checkpoint_though_nobody_reads_what_the_run_prints(tmp_path: Path) -> None:
    """Ctrl-C ends the readers of a pipe too, and SIGHUP comes from a terminal that is closed."""
    folder = tmp_path / "run"
    with running("--output", str(folder)) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.stderr.close()
        time.sleep(0.5)  # in which the run prints several lines
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 75
    assert len(saved_steps(folder)) == 1


@pytest.mark.large
def test_a_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    with running("--output", str(tmp_path / "run"), program=("-c", SLOW_SAVES)) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert process.stderr.readline().startswith("SIGTERM: saving a checkpoint")
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGTERM
    assert told == f"SIGTERM: ended at once; continue with --resume {tmp_path / 'run'}\n"
    assert saved_steps(tmp_path / "run") == []


def test_a_signal_without_a_run_folder_ends_the_run_at_once() -> None:
    with running() as process:
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=10)
    assert (process.returncode, told) == (128 + signal.SIGTERM, "SIGTERM: nothing is saved without --output\n")
