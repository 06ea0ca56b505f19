"""Logs of resumed runs: later records are dropped, and damaged lines do not block."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from jaxddp.config import TrainConfig
from jaxddp.errors import InputError
from jaxddp.files import UNFINISHED
from jaxddp.tracking import run_log
from jaxddp.tracking.metrics_file import read_metrics
from jaxddp.tracking.resumed import check_same_epochs, check_same_run, notes_of_run
from jaxddp.tracking.run_folder import load_config, save_digests
from jaxddp.tracking.run_log import RunLog
from tests.support.run_logs import CONFIG, SIX_STEPS, STEPS_PER_EPOCH, claimed_log, places, train, write_run


@pytest.mark.parametrize(("resume_step", "kept"), [(0, 0), (3, 4), (4, 6), (6, 9)])
@pytest.mark.parametrize("torn", ["", '{"kind": "step", "st', '{"kind": "step", "step": 9}', "\x00\x00"])
def test_resume_drops_records_of_later_steps(tmp_path, monkeypatch, resume_step, kept, torn):
    output, drawn = tmp_path / "run", []
    monkeypatch.setattr(run_log, "draw_curves", lambda history, title: drawn.append(history) or b"")
    write_run(output, 6)
    metrics = output / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + torn)
    with claimed_log(output, resume=True, resume_step=resume_step) as log:
        assert places(read_metrics(metrics)) == SIX_STEPS[:kept]
        train(log, resume_step + 1, 6)
    assert places(read_metrics(metrics)) == SIX_STEPS
    assert drawn[0] == drawn[1]  # the whole history, as for an uninterrupted run
    assert not list(output.glob(f"*{UNFINISHED}"))


def test_resume_saves_the_new_config_and_needs_no_metrics_file(tmp_path):
    write_run(tmp_path / "run", 2)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    longer = TrainConfig(epochs=20)
    with RunLog(longer, tmp_path / "run", title="t", examples_per_epoch=64, resume_step=2) as log:
        train(log, 3, 4)
    assert load_config(tmp_path / "run", TrainConfig) == longer
    assert places(read_metrics(tmp_path / "run" / "metrics.jsonl")) == SIX_STEPS[3:6]


def test_truncated_metrics_are_read_up_to_the_cut(tmp_path):
    write_run(tmp_path / "run", 2)
    path = tmp_path / "run" / "metrics.jsonl"
    content, whole = path.read_bytes(), read_metrics(path)
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        complete = content[: cut + 1].count(b"\n")  # only the newline may be missing
        assert read_metrics(path) == whole[:complete]


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[1]", "3", "{}", '{"kind": "step"}', "\x00\x00", "[" * 100_000, 5000 * "9"),
        '{"kind": "step", "step": "x", "epoch": 1}',
        '{"kind": "step", "step": true, "epoch": 1}',
        '{"kind": "step", "step": 1, "epoch": 1, "loss": "abc"}',
        '{"kind": "step", "step": 1, "epoch": 1, "loss": ' + 400 * "9" + "}",
        '{"kind": "step", "step": 9223372036854775808, "epoch": 1}',
        '{"kind": "epoch", "step": 2, "epoch": 0}',
        '{"kind": "epoch", "step": 1}',
        '{"kind": "other", "step": 1, "epoch": 1}',
    ],
    ids=lambda line: line[:50].encode("unicode_escape").decode(),
)
@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_line_that_is_not_a_record_does_not_block_a_resumed_run(tmp_path, line, place):
    write_run(tmp_path / "run", 2)
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines.insert(place, line)
    path.write_text("\n".join(lines))
    check_same_epochs(tmp_path / "run", STEPS_PER_EPOCH)
    with claimed_log(tmp_path / "run", resume=True, resume_step=2) as log:
        train(log, 3, 4)
    assert places(read_metrics(path)) == SIX_STEPS[:6]
    assert len(path.read_text().splitlines()) == 6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Path.mkdir, r"cannot be read \(Is a directory\)"),
        (os.mkfifo, "is a pipe, a device or a socket; must be a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a pipe, a device or a socket; must be a regular file"),
    ],
    ids=["folder", "pipe", "device"],
)
def test_metrics_that_are_no_regular_file_are_named(tmp_path, make, message):
    write_run(tmp_path / "run", 2)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    make(tmp_path / "run" / "metrics.jsonl")
    with pytest.raises(InputError, match=rf"metrics\.jsonl: {message}$"):
        write_more(tmp_path / "run")


def write_more(output: Path) -> None:
    """Write steps 5 and 6 of a run whose first four steps had 6 records."""
    with claimed_log(output, resume=True, resume_step=4, resume_records=6) as log:
        train(log, 5, 6)


@pytest.mark.parametrize(
    ("lost", "note"),
    [
        (slice(0, 0), None),
        (slice(2, None), "4 of 6 records until step 4 are missing, most of them between steps 2 and 4"),
        (slice(0, 4), "4 of 6 records until step 4 are missing, most of them between steps 0 and 4"),
        (slice(1, 3), "2 of 6 records until step 4 are missing, most of them between steps 1 and 3"),
        (slice(None), "6 of 6 records until step 4 are missing, most of them between steps 0 and 4"),
    ],
    ids=["none", "end", "start", "middle", "all"],
)
def test_records_that_are_missing_are_told(tmp_path, capsys, lost, note):
    write_run(tmp_path / "run", 4)
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 6
    del lines[lost]
    path.write_text("".join(lines))
    capsys.readouterr()
    write_more(tmp_path / "run")
    told = [line for line in capsys.readouterr().out.splitlines() if "missing" in line]
    assert told == ([] if note is None else [f"note: {path}: {note}"])


def test_resume_needs_the_same_number_of_steps_per_epoch(tmp_path):
    check_same_epochs(tmp_path, 7)  # no epoch has ended yet
    write_run(tmp_path / "run", 6)
    check_same_epochs(tmp_path / "run", STEPS_PER_EPOCH)
    message = r"^--resume .*run: its epochs had 2 steps and would now have 3; keep its data and --devices"
    with pytest.raises(InputError, match=message):
        check_same_epochs(tmp_path / "run", 3)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 1}, "with --seed 1 and not --seed 0"),
        ({"dataset": "linear"}, "with --dataset linear and not --dataset digits"),
        ({"hidden_sizes": (8,)}, "with --hidden-sizes 8 and not --hidden-sizes 16"),
        ({"optimizer": "sgd"}, "with --optimizer sgd and not --optimizer adam"),
        ({"freeze": ("*.bias",)}, r"with --freeze \*.bias and not --freeze "),
        ({}, "with other data"),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, other, message):
    now = TrainConfig(hidden_sizes=(16,), betas=(0.5, 0.9), weights="here", output="here")

    def check(other_options, data):
        before = dataclasses.replace(now, weights="there", output="there", **other_options)
        notes = json.loads(json.dumps(notes_of_run(before, {"train": data}, 0)))  # as in jaxddp's checkpoints
        return check_same_run(tmp_path, 4, notes, now, {"train": "1"})

    assert check({}, "1") == check_same_run(tmp_path, 4, {}, now, {"train": "1"}) == []  # {}: of an older jaxddp
    assert check({}, "2") == []  # somebody has removed data.json, to go on with any data
    save_digests({"train": "1"}, tmp_path)
    refused = f"^--resume {tmp_path}: the checkpoint of step 4 is of another run, {message}$"
    with pytest.raises(InputError, match=refused):
        check(other, "1" if other else "2")


def test_a_run_killed_at_its_start_leaves_its_config(tmp_path, monkeypatch):
    def die(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_log, "open_metrics", die)
    with pytest.raises(KeyboardInterrupt), claimed_log(tmp_path / "run"):
        pass
    assert load_config(tmp_path / "run", TrainConfig) == CONFIG
