"""Tensors of a folder are mapped bit by bit, and neither written nor read through a copy of all."""

import pickle
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxddp.parity.stored_tensors import StoredTensors, write_tensors
from tests.support.tensors import NAMES, TENSORS, VIEWS, same_bits

LARGE = {str(number): np.full(2**17, float(number)) for number in range(20)}  # 20 MiB


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(NAMES, TENSORS, max_size=4))
def test_tensors_are_read_back_bit_by_bit(tensors: dict[str, np.ndarray]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_tensors(Path(folder) / "tensors", tensors)
        stored: StoredTensors = pickle.loads(pickle.dumps(StoredTensors(Path(folder) / "tensors")))
        assert list(stored) == list(tensors) and "another" not in stored
        assert all(same_bits(stored[name], value) for name, value in tensors.items())


def test_tensors_that_are_not_contiguous_are_read_back(tmp_path: Path) -> None:
    write_tensors(tmp_path / "tensors", VIEWS)
    assert all(np.array_equal(x, VIEWS[name]) for name, x in StoredTensors(tmp_path / "tensors").items())


def test_a_change_of_an_array_does_not_reach_its_file(tmp_path: Path) -> None:
    write_tensors(tmp_path / "tensors", {"w": np.zeros(3)})
    stored = StoredTensors(tmp_path / "tensors")
    stored["w"][:] = 1.0
    assert stored["w"].tolist() == [0.0, 0.0, 0.0]


def test_large_tensors_are_written_and_read_without_a_copy(tmp_path: Path) -> None:
    tracemalloc.start()
    write_tensors(tmp_path / "tensors", LARGE)
    sums = [float(x.sum()) for x in StoredTensors(tmp_path / "tensors").values()]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sums == [float(x.sum()) for x in LARGE.values()]
    assert most < 2**18  # measured: 50,000 bytes; a tensor takes 2**20
