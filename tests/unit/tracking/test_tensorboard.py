"""TensorBoard files can be read back, and have each step once."""

import errno

import pytest

from jaxddp.tracking.tensorboard import EventFile
from tests.support.run_logs import open_log, read_events, scalars, train, write_run


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


def test_a_file_whose_first_write_fails_is_closed(tmp_path, monkeypatch):
    files = []

    def fail(event_file):
        files.append(event_file._file)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(EventFile, "_flush", fail)
    with pytest.raises(OSError, match="No space left"):
        EventFile(tmp_path / "tensorboard", None)
    assert files[0].closed
