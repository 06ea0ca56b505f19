"""Runs on a stream: the same numbers in both trainers, and the same bits after a resume within an epoch."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxddp import train as jax_trainer
from jaxddp.data.sources.stream import Stream
from jaxddp.nn.torch_weights import load_weights
from jaxddp.parity.port.loading import load_port
from tests.end_to_end.test_run_files import assert_same, start
from tests.support.run_files import Change, in_jax, in_torch, write
from tests.support.train_runs import check_same_weights, records, saved_steps

DATA = "def train_data():\n    return data(75, 0)\n"
STATEFUL = '''
class Shuffled:
    """75 examples in an order that depends on the pass."""

    def __init__(self):
        self.at = self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        arrays = data(75, 0)
        order = np.random.default_rng(self.epoch).permutation(75)
        while self.at < 75:
            self.at += 1
            yield {name: array[order[self.at - 1]] for name, array in arrays.items()}
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def train_data():
    return Shuffled()
'''
FLAGS = "steps_per_epoch = 7\n"  # 112 examples: one pass and a half
KEPT: dict[str, Any] = {"steps_per_dispatch": 3, "checkpoint_every": "3steps", "keep_checkpoints": 9}
STATELESS: Change = ("    def state_dict", "    def no_state")


def write_run(folder: Path, *changes: Change) -> Path:
    return write(folder, (DATA, STATEFUL), *changes, more=FLAGS)


def resumed_from_step_3(path: Path, folder: Path) -> None:
    """Train on from the checkpoint of step 3, as if the run had been killed after it; the first run moves to "all"."""
    shutil.copytree(folder, folder.parent / "all", dirs_exist_ok=True)
    for step in saved_steps(folder):
        if step > 3:
            shutil.rmtree(folder / "checkpoints" / f"{step}")
    in_jax(path, folder, resume=str(folder))


@pytest.mark.large
def test_both_trainers_agree_and_resume_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, weights = write_run(tmp_path), start(tmp_path)
    expected = in_jax(path, tmp_path / "parts", weights=weights, **KEPT)
    assert_same(expected, in_torch(path, tmp_path / "torch", weights=weights))
    assert [record["examples"] for record in records(tmp_path / "parts") if record["kind"] == "step"] == [16] * 14
    assert "train_data()" not in capsys.readouterr().out  # nothing is to be said of a stream that resumes

    resumed_from_step_3(path, tmp_path / "parts")
    assert "nothing checks that it is the one of the run so far" in capsys.readouterr().out
    assert records(tmp_path / "parts") == records(tmp_path / "all")
    check_same_weights(tmp_path / "all", tmp_path / "parts")

    in_torch(path, tmp_path / "in two", weights=weights, epochs=1)
    assert in_torch(path, tmp_path / "in two", resume=str(tmp_path / "in two")) == in_torch(
        path, tmp_path / "again", weights=weights
    )
    check_same_weights(tmp_path / "again", tmp_path / "in two")

    with pytest.MonkeyPatch.context() as patch:  # the position of the batch that is read ahead
        patch.setattr(Stream, "note", lambda stream, step: stream._notes[max(stream._notes)])
        in_jax(path, tmp_path / "ahead", weights=weights, **KEPT)
    resumed_from_step_3(path, tmp_path / "ahead")
    one, other = (load_weights(tmp_path / name / "model.safetensors") for name in ("parts", "ahead"))
    assert not np.array_equal(one["fc1.weight"], other["fc1.weight"])


@pytest.mark.large
def test_a_stream_without_a_state_is_read_from_its_start_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, weights = write_run(tmp_path, STATELESS), start(tmp_path)
    in_jax(path, tmp_path / "parts", weights=weights, **KEPT)
    assert "has no state_dict; a resumed run reads it from its start" in capsys.readouterr().out
    resumed_from_step_3(path, tmp_path / "parts")
    assert "run.py: train_data(): has no state to load; 48 examples were read and skipped" in capsys.readouterr().out
    assert records(tmp_path / "parts") == records(tmp_path / "all")
    check_same_weights(tmp_path / "all", tmp_path / "parts")
    with pytest.raises(Exception, match=r"^--steps-per-epoch 8: the run in .* must continue with --steps-per-epoch 7$"):
        jax_trainer.run(path, resume=str(tmp_path / "parts"), steps_per_epoch=8)


def test_the_check_takes_the_batches_of_both_trainers_from_the_stream(tmp_path: Path) -> None:
    port = load_port(write_run(tmp_path), world_size=2)
    jaxs, torchs = port.jax_batch, port.torch_batch
    assert jaxs is not None and torchs is not None and port.steps_per_epoch == 7
    for step in (8, 3, 0):  # forward and back, over the end of a pass
        for rank in (1, 0):
            one, other = (batch_of(step, rank) for batch_of in (jaxs, torchs))
            assert all(np.array_equal(one[name], other[name]) for name in ("x", "y"))
    assert not np.array_equal(one["x"], jaxs(0, 1)["x"])
