"""Run log: console output, files in the run folder, and files after a killed and resumed run."""

import contextlib
import io
import itertools
import json
import os
import re
import resource
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxddp.config import TrainConfig
from jaxddp.errors import InputError, TrainingError
from jaxddp.tracking import run_log
from jaxddp.tracking.gradient_metrics import LOG2_BINS
from jaxddp.tracking.metrics_file import read_metrics
from jaxddp.tracking.resumed import check_same_epochs
from jaxddp.tracking.run_folder import claim_output, load_config
from jaxddp.tracking.run_log import RunLog

CONFIG = TrainConfig(epochs=10)
STEPS_PER_EPOCH = 2


def open_log(output: Path | None, **options) -> RunLog:
    return RunLog(CONFIG, output, title="a test", examples_per_epoch=64, **options)


@contextlib.contextmanager
def claimed_log(output: Path, resume: bool = False, **options) -> Iterator[RunLog]:
    with claim_output(output, resume) as folder, open_log(folder, **options) as log:
        yield log


def train(log: RunLog, first_step: int, last_step: int) -> None:
    """Log what a trainer reports: losses 1 / step, accuracies 1 - loss, two steps per epoch."""
    for step in range(first_step, last_step + 1):
        epoch = (step + 1) // STEPS_PER_EPOCH
        metrics = {"loss": 1 / step, "accuracy": 1 - 1 / step}
        log.step(step, epoch, metrics, examples=32)
        if step % STEPS_PER_EPOCH == 0:
            log.epoch(step, epoch, metrics, metrics, examples_per_second=1000)


def write_run(output: Path, last_step: int, quiet: bool = False) -> None:
    with claimed_log(output, quiet=quiet) as log:
        train(log, 1, last_step)


def places(records: list[dict]) -> list[tuple[str, int]]:
    return [(record["kind"], record["step"]) for record in records]


SIX_STEPS = [("step", 1), ("step", 2), ("epoch", 2), ("step", 3), ("step", 4), ("epoch", 4), ("step", 5), ("step", 6)]
SIX_STEPS += [("epoch", 6)]


# ---- console


def test_the_title_of_a_file_whose_name_is_not_utf8_can_be_printed_and_drawn():
    config = TrainConfig(dataset="npz", data_path=os.fsdecode(b"sp\xe4.npz"))
    title = run_log.run_title(config, replicas=2, framework="JAX")
    assert title.startswith("mlp on sp?.npz")
    assert title.encode().decode() == title


def test_lines_are_aligned_and_on_stdout_only(capsys):
    with open_log(None) as log:
        metrics = {"loss": 0.1234564, "accuracy": 0.97123}
        log.step(1, 3, metrics, examples=32)
        log.epoch(60, 3, metrics, {"loss": 0.23456749, "accuracy": 0.9694}, examples_per_second=12345.4)
        log.epoch(200, 10, metrics, {}, examples_per_second=123456)
        log.summary(0.98056, 11.34, "replicas identical", "2 skipped")
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "a test",
        "epoch  3/10  train loss 0.123456  accuracy 0.9712  test loss 0.234567  accuracy 0.9694   12,345 examples/s",
        "epoch 10/10  train loss 0.123456  accuracy 0.9712  123,456 examples/s",
        "test accuracy 0.9806   11.3 s   replicas identical   2 skipped",
    ]
    assert err == ""


def test_the_summary_names_the_run_folder(tmp_path, capsys):
    with claimed_log(tmp_path / "run") as log:
        log.summary(0.5, 1)
    *_, result, place = capsys.readouterr().out.splitlines()
    assert result == "test accuracy 0.5000   1.0 s"
    assert place == f"saved to {tmp_path / 'run'}"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("quiet", [False, True])
def test_the_progress_bar_is_shown_only_on_terminals(monkeypatch, capsys, quiet):
    terminal, now = Terminal(), itertools.count(step=0.08)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("tqdm.std.time", lambda: next(now))  # tqdm draws a bar at most every 0.1 s
    with open_log(None, quiet=quiet) as log:
        for epoch in (1, 2):
            log.step(epoch, epoch, {"loss": 0.5, "accuracy": 0.25}, examples=64)
            log.epoch(epoch, epoch, {"loss": 0.5}, {}, examples_per_second=1)
        log.step(3, 3, {"loss": 0.25, "accuracy": 0.5}, examples=64)
    if quiet:
        assert terminal.getvalue() == capsys.readouterr().out == ""
    else:
        shown = [line.strip() for line in terminal.getvalue().split("\r")]
        assert any(line.startswith("epoch  3/10  loss 0.250000  accuracy 0.5000 |███████▏ ") for line in shown)
        assert shown[-1] == ""  # the bar is gone
        assert [line[:11] for line in capsys.readouterr().out.splitlines()[1:]] == ["epoch  1/10", "epoch  2/10"]


# ---- metrics file and curves


def test_metrics_are_strict_json(tmp_path):
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
    assert (tmp_path / "run" / "curves.png").is_file()


def test_a_run_folder_has_config_curves_metrics_and_tensorboard(tmp_path):
    write_run(tmp_path / "run", 2)
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == [".lock", "config.json", "curves.png", "metrics.jsonl", "tensorboard"]
    assert load_config(tmp_path / "run", TrainConfig) == CONFIG


def test_a_run_without_steps_has_no_curves(tmp_path):
    with claimed_log(tmp_path / "run"):
        pass
    assert not (tmp_path / "run" / "curves.png").exists()


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
    assert not list(output.glob("*.tmp"))


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


def test_a_metrics_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(InputError, match=r"metrics\.jsonl: cannot be read \(Is a directory\)$"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_resume_needs_the_same_number_of_steps_per_epoch(tmp_path):
    check_same_epochs(tmp_path, 7)  # no epoch has ended yet
    write_run(tmp_path / "run", 6)
    check_same_epochs(tmp_path / "run", STEPS_PER_EPOCH)
    message = r"^--resume .*run: its epochs had 2 steps and would now have 3; keep its data and --devices"
    with pytest.raises(InputError, match=message):
        check_same_epochs(tmp_path / "run", 3)


def test_a_run_killed_at_its_start_leaves_its_config(tmp_path, monkeypatch):
    def die(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_log, "open_metrics", die)
    with pytest.raises(KeyboardInterrupt), claimed_log(tmp_path / "run"):
        pass
    assert load_config(tmp_path / "run", TrainConfig) == CONFIG


# ---- size


@pytest.mark.parametrize(
    ("epochs", "log_every", "steps"),
    [
        (10, None, range(1, 21)),
        (2500, None, range(1, 5001)),
        (2501, None, range(2, 5003, 2)),
        (40_000, None, range(16, 80_001, 16)),
        (10, 7, (7, 14)),
        (2501, 1, range(1, 5003)),
    ],
)
def test_the_folder_gets_at_most_5000_steps_or_every_nth(tmp_path, epochs, log_every, steps):
    config = TrainConfig(epochs=epochs, log_every=log_every)
    with RunLog(config, tmp_path, title="", examples_per_epoch=33, quiet=True) as log:
        for step in range(1, STEPS_PER_EPOCH * epochs + 1):
            log.step(step, (step + 1) // STEPS_PER_EPOCH, {"loss": 1 / step}, examples=16)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [(record["step"], record["loss"]) for record in records] == [(step, 1 / step) for step in steps]
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert [step for _, step in scalars(read_events(file))] == list(steps)


@pytest.mark.parametrize(("epochs", "logged"), [(250, range(1, 251)), (1001, (*range(5, 1001, 5), 1001))])
def test_tensorboard_gets_at_most_250_histograms_and_the_last(tmp_path, epochs, logged):
    with RunLog(TrainConfig(epochs=epochs), tmp_path, title="", examples_per_epoch=33, quiet=True) as log:
        for epoch in range(1, epochs + 1):
            log.step(epoch, epoch, {"loss": 1.0}, examples=33)
            log.histograms(epoch, {"fc.weight": [epoch] * len(LOG2_BINS)})
            log.epoch(epoch, epoch, {"loss": 1.0}, {"loss": 1.0}, examples_per_second=1)
    (file,) = (tmp_path / "tensorboard").iterdir()
    values = [(event.step, value) for event in read_events(file) for value in event.summary.value]
    histograms = [(step, value.histo) for step, value in values if value.HasField("histo")]
    assert [(step, histogram.bucket[0]) for step, histogram in histograms] == [(epoch, epoch) for epoch in logged]
    assert sum(value.tag == "loss/test" for _, value in values) == epochs


def test_the_memory_of_a_long_run_stays_level(tmp_path):
    tracemalloc.start()
    try:
        with RunLog(TrainConfig(epochs=750, log_every=1), tmp_path, title="", examples_per_epoch=64) as log:
            train(log, 1, 500)
            before = tracemalloc.get_traced_memory()[0]
            train(log, 501, 1500)
            growth = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert growth < 20_000  # measured: 300; with a record kept per step: 2,900,000


# ---- a disk that fills up


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let writes beyond `size` bytes of any file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("values", "file"), [(0, r"metrics\.jsonl"), (20, r"tensorboard/events\.\S+")])
def test_a_full_disk_ends_the_run_in_one_line_and_keeps_what_was_written(tmp_path, capfd, values, file):
    more = {f"{'grad_norm/' if values else 'x'}{i}": 1.0 for i in range(values)}

    def train_on(log: RunLog) -> None:
        for step in range(1, 41):
            log.step(step, step, {"loss": 1 / step} | more, examples=64)
            for _ in range(values):
                log.histograms(step, {"fc": [1] * len(LOG2_BINS)})

    with claimed_log(tmp_path / "run", quiet=True) as log:
        train_on(log)
    whole = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with (
        largest_file(9000 if values else len(whole) - 30),
        pytest.raises(TrainingError) as error,
        claimed_log(tmp_path / "full", quiet=True) as log,
    ):
        train_on(log)
    assert re.fullmatch(rf"{tmp_path}/full/{file}: cannot be written \(file too large\)", str(error.value))
    written = (tmp_path / "full" / "metrics.jsonl").read_bytes()
    assert whole.startswith(written) and read_metrics(tmp_path / "full" / "metrics.jsonl")
    assert capfd.readouterr() == ("", "")
    with claimed_log(tmp_path / "full", resume=True, resume_step=1, quiet=True) as log:
        assert places(read_metrics(tmp_path / "full" / "metrics.jsonl")) == [("step", 1)]


def test_a_disk_that_is_full_at_the_start_or_end_is_told_with_the_file(tmp_path, monkeypatch):
    with (
        largest_file(300),
        pytest.raises(InputError, match=r"new/config\.json: cannot be written \(file too large\)$"),
        claimed_log(tmp_path / "new", quiet=True),
    ):
        pass
    write_run(tmp_path / "new", 6)  # the folder can be used again
    metrics = tmp_path / "new" / "metrics.jsonl"
    before = metrics.read_bytes()
    with (
        largest_file(300),
        pytest.raises(InputError, match=r"new/metrics\.jsonl: cannot be written \(file too large\)$"),
        claimed_log(tmp_path / "new", resume=True, resume_step=6, quiet=True),
    ):
        pass
    assert metrics.read_bytes() == before
    monkeypatch.setattr(run_log, "draw_curves", lambda history, title: bytes(10_000))
    end = r"end/curves\.png: cannot be written \(file too large\); all other files are kept$"
    with largest_file(9000), pytest.raises(TrainingError, match=end):
        write_run(tmp_path / "end", 6, quiet=True)
    assert (tmp_path / "end" / "metrics.jsonl").read_bytes() == before
    assert not list(tmp_path.rglob("*.tmp"))


# ---- TensorBoard


def read_events(file: Path) -> list:
    """Read the events of one file, with their checksums verified."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    content, events, start = file.read_bytes(), [], 0
    while start < len(content):
        (length,) = struct.unpack_from("<Q", content, start)
        payload = content[start + 12 : start + 12 + length]
        assert struct.unpack_from("<I", content, start + 12 + length) == (masked_crc32c(payload),)
        events.append(Event.FromString(payload))
        start += length + 16
    return events


def scalars(events: list) -> dict[tuple[str, int], float]:
    return {(value.tag, event.step): value.simple_value for event in events for value in event.summary.value}


def test_tensorboard_events_can_be_read_back(tmp_path):
    write_run(tmp_path / "run", 2)
    (file,) = (tmp_path / "run" / "tensorboard").iterdir()
    losses = {("loss/step", 1): 1, ("loss/step", 2): 0.5, ("loss/train", 2): 0.5, ("loss/test", 2): 0.5}
    accuracies = {(tag.replace("loss", "accuracy"), step): 1 - loss for (tag, step), loss in losses.items()}
    assert scalars(read_events(file)) == losses | accuracies | {("examples_per_second", 2): 1000}


def test_tensorboard_hides_the_steps_that_a_resumed_run_repeats(tmp_path):
    write_run(tmp_path / "run", 4)
    with open_log(tmp_path / "run", resume_step=2) as log:
        train(log, 3, 4)
    files = sorted((tmp_path / "run" / "tensorboard").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    assert len(files) == 2  # written within one second
    events = read_events(files[1])
    purges = [event.step for event in events if event.HasField("session_log")]
    assert purges == [3]  # TensorBoard hides steps from here on
    assert {step for _, step in scalars(events)} == {3, 4}


def test_a_nan_in_tensorboard_raises_no_warning(tmp_path, caplog):
    with claimed_log(tmp_path / "run") as log:
        log.step(1, 1, {"loss": float("nan")}, examples=32)
    assert caplog.records == []


# ---- imports


@pytest.mark.large
def test_datasets_and_run_log_import_neither_jax_nor_torch(tmp_path):
    program = f"""
import sys
from pathlib import Path
from jaxddp.data import datasets
from jaxddp.config import TrainConfig
from jaxddp.tracking.run_log import RunLog
for options in ({{}}, {{"dataset": "linear"}}, {{"dataset": "names", "model": "char_mlp"}}):
    datasets.load(TrainConfig(**options))
with RunLog(TrainConfig(), Path({str(tmp_path)!r}), title="t", examples_per_epoch=1, quiet=True) as log:
    log.step(1, 1, {{"loss": 1.0}}, examples=1)
print(sorted({{"jax", "torch"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert (tmp_path / "curves.png").is_file()
