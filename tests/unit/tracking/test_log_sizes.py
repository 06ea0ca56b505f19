"""Logs stay small however long a run is, and a full disk loses nothing that was written."""

import contextlib
import re
import resource
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from jaxddp.config import TrainConfig
from jaxddp.errors import InputError, TrainingError
from jaxddp.files import UNFINISHED
from jaxddp.tracking import run_log
from jaxddp.tracking.gradient_metrics import LOG2_BINS
from jaxddp.tracking.metrics_file import read_metrics
from jaxddp.tracking.run_log import RunLog
from tests.support.run_logs import STEPS_PER_EPOCH, claimed_log, places, read_events, scalars, train, write_run

LAST = range(3200, 5003, 16)


@pytest.mark.parametrize(
    ("epochs", "log_every", "steps"),
    [
        (10, None, range(1, 21)),
        (2501, None, [*range(1, 400), *range(400, 800, 2), *range(800, 1600, 4), *range(1600, 3200, 8), *LAST]),
        (10, 7, (7, 14)),
        (2501, 1, range(1, 5003)),
    ],
)
def test_the_folder_gets_ever_fewer_steps_or_every_nth(tmp_path, epochs, log_every, steps):
    config = TrainConfig(epochs=epochs, log_every=log_every)
    with RunLog(config, tmp_path, title="", examples_per_epoch=33, quiet=True) as log:
        for step in range(1, STEPS_PER_EPOCH * epochs + 1):
            log.step(step, (step + 1) // STEPS_PER_EPOCH, {"loss": 1 / step}, examples=16)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [(record["step"], record["loss"]) for record in records] == [(step, 1 / step) for step in steps]
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert [step for _, step in scalars(read_events(file))] == list(steps)


def test_the_first_steps_are_all_logged_and_no_run_logs_more_than_5000() -> None:
    is_logged = TrainConfig().is_logged
    assert all(map(is_logged, range(1, 401)))
    steps = [step for step in range(1, 100_000) if is_logged(step)]
    gaps = np.diff(steps)
    assert (np.diff(gaps) >= 0).all() and gaps[-1] == 256
    most, step = 0, 1
    while step < 2**31:  # from a logged step to the next
        most += 1
        gap = next(gap for gap in (2**k for k in range(31)) if is_logged(step + gap))
        step += gap
    assert 4000 < most <= 5000


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
        pytest.raises(
            InputError, match=r"new/metrics\.jsonl: cannot be written \(file too large\); the .* step 6 is k"
        ),
        claimed_log(tmp_path / "new", resume=True, resume_step=6, quiet=True),
    ):
        pass
    assert metrics.read_bytes() == before
    monkeypatch.setattr(run_log, "draw_curves", lambda history, title: bytes(10_000))
    end = (
        r"end/curves\.png: cannot be written \(file too large\); all other files and the checkpoint of step 6 are kept"
    )
    with largest_file(9000), pytest.raises(TrainingError, match=end):
        write_run(tmp_path / "end", 6, quiet=True)
    assert (tmp_path / "end" / "metrics.jsonl").read_bytes() == before
    assert not list(tmp_path.rglob(f"*{UNFINISHED}"))
