"""Records are written to files and read back bit by bit, a stage at a time."""

import gc
import pickle
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from jaxddp.parity.records import Lazy, Record, Records, RecordWriter, Scratch
from tests.support.tensors import NAMES, TENSORS, VIEWS, same_bits

STAGES = st.text("ab_", min_size=1, max_size=4)  # one may be a prefix of another
RECORDS = st.dictionaries(STAGES, st.dictionaries(NAMES, TENSORS, max_size=3), max_size=4)


def written(folder: Path, *records: Record, **notes: object) -> Path:
    writer = RecordWriter(folder)
    for record in records:
        writer.write(record, **notes)
    return folder


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(RECORDS)
def test_a_record_is_read_back_bit_by_bit(record: Record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stored = Records([written(Path(folder), record, step=1)])[0]
        assert stored.notes == {"step": 1}
        assert list(stored) == list(record) and len(stored) == len(record)
        for stage, tensors in record.items():
            assert stored[stage].keys() == tensors.keys()
            assert all(same_bits(stored[stage][name], value) for name, value in tensors.items())


def test_arrays_that_are_not_contiguous_are_read_back(tmp_path: Path) -> None:
    stored = Records([written(tmp_path, {"params": VIEWS})])[0]["params"]
    assert all(np.array_equal(stored[name], value) for name, value in VIEWS.items())


def test_records_are_read_in_another_process(tmp_path: Path) -> None:
    for rank in range(2):
        written(tmp_path / str(rank), {"local_loss": {"loss": np.float64(rank)}})
    records = Records([tmp_path / "0", tmp_path / "1"], ("local_loss",), owner=open)
    (there,) = pickle.loads(pickle.dumps(records))
    assert there["local_loss"]["loss"].tolist() == [0.0, 1.0]


def test_a_missing_stage_is_a_key_error(tmp_path: Path) -> None:
    record = Records([written(tmp_path, {"local_loss": {"loss": np.ones(1)}, "spread": {}})])[0]
    assert record["spread"] == {} and "loss" not in record and record.get("local") is None
    with pytest.raises(KeyError, match="local"):
        record["local"]


def test_stacked_stages_hold_every_rank_and_others_rank_0(tmp_path: Path) -> None:
    for rank in range(3):
        record = {"local_loss": {"loss": np.float64(rank)}, "params": {"w": np.full(2, rank)}}
        written(tmp_path / str(rank), record, rank=rank)
    stored = Records([tmp_path / str(rank) for rank in range(3)], stacked=("local_loss",))[0]
    assert stored["local_loss"]["loss"].tolist() == [0.0, 1.0, 2.0]
    assert stored["params"]["w"].tolist() == [0, 0]
    assert stored.notes == {"rank": 0}


def test_only_steps_that_every_rank_has_written_are_counted(tmp_path: Path) -> None:
    ranks = [tmp_path / "0", tmp_path / "1"]
    records, writer = Records(ranks), RecordWriter(ranks[0])
    written(ranks[1], *[{"params": {"w": np.ones(1)}}] * 3)
    assert len(records) == 0
    writer.write({"params": {"w": np.zeros(1)}})
    assert len(records) == 1
    (ranks[0] / "000001.part").write_bytes(b"half a reco")
    assert len(records) == 1 and next(iter(records))["params"]["w"] == 0
    with pytest.raises(IndexError):
        records[1]


def test_a_half_written_record_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_half(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half a reco")
        raise OSError("no space left")

    monkeypatch.setattr("jaxddp.parity.records.save_file", save_half)
    with pytest.raises(OSError, match="no space left"):
        written(tmp_path, {"params": {"w": np.ones(1)}})
    assert list(tmp_path.iterdir()) and len(Records([tmp_path])) == 0


def test_a_long_run_is_never_held_in_memory_as_a_whole(tmp_path: Path) -> None:
    size, steps = 100_000, 20  # 0.8 MB a record, 16 MB in all
    tracemalloc.start()
    try:
        writer = RecordWriter(tmp_path)
        for step in range(steps):
            writer.write({"params": {"w": np.full(size, float(step))}, "other": {"w": np.zeros(size)}})
        records = Records([tmp_path])
        sums = [float(record["params"]["w"].sum()) for record in records]
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sums == [float(step * size) for step in range(steps)]
    assert most < 6 * 8 * size  # measured: 3 arrays at once


def test_a_damaged_file_raises(tmp_path: Path) -> None:
    (written(tmp_path, {"params": {"w": np.ones(4)}}) / "000000.safetensors").write_bytes(b"not a record")
    with pytest.raises(SafetensorError, match="header"):
        Records([tmp_path])[0]


def test_lazy_items_are_made_at_each_access() -> None:
    made: list[int] = []

    def make(index: int) -> int:
        made.append(index)
        return index * 10

    lazy = Lazy(lambda: 4, make)
    assert not made
    assert (lazy[-1], lazy[1], lazy[1:3], lazy[::-2]) == (30, 10, [10, 20], [30, 10])
    assert made == [3, 1, 1, 2, 3, 1]
    for beyond in (4, -5):
        with pytest.raises(IndexError):
            lazy[beyond]


def test_a_scratch_folder_lives_as_long_as_its_records() -> None:
    scratch = Scratch()
    path = scratch.path
    records = Records([written(path / "rank0", {"params": {"w": np.ones(1)}})], owner=scratch)
    del scratch
    gc.collect()
    assert records[0]["params"]["w"] == 1
    del records
    gc.collect()
    assert not path.exists()


def test_notes_that_json_cannot_hold_leave_no_file(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    with pytest.raises(TypeError, match="JSON serializable"):
        writer.write({"params": {"w": np.ones(1)}}, groups=object())
    assert not list(tmp_path.iterdir())
