"""Arrays from .npz files: conversion, and errors for malformed files."""

import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from jaxddp.config import TrainConfig
from jaxddp.data.datasets import Dataset, load
from jaxddp.errors import InputError
from tests.unit.data.test_datasets import assert_well_formed


def npz_arrays() -> dict[str, np.ndarray]:
    """Six training and three test examples of shape (2, 2)."""
    x = np.random.default_rng(0).normal(size=(9, 2, 2))
    y = np.array([0, 1, 2, 0, 1, -100, 3, 0, 1])
    return {"x_train": x[:6], "y_train": y[:6], "x_test": x[6:], "y_test": y[6:]}


def load_npz(path: Path, arrays: dict[str, np.ndarray]) -> Dataset:
    np.savez(path, **arrays)
    return load(TrainConfig(dataset="npz", data_path=str(path)))


def test_npz_arrays_are_cast_and_classes_counted(tmp_path):
    arrays = npz_arrays()
    dataset = load_npz(tmp_path / "data.npz", arrays)
    assert_well_formed(dataset)
    assert (dataset.name, dataset.num_classes, dataset.input_shape) == ("npz", 4, (2, 2))
    np.testing.assert_array_equal(dataset.train["x"], arrays["x_train"].astype(np.float32))
    np.testing.assert_array_equal(dataset.train["y"], arrays["y_train"])


def test_npz_scales_only_uint8(tmp_path):
    arrays = npz_arrays()
    counts = {name: np.arange(x.size).reshape(x.shape) for name, x in arrays.items() if name.startswith("x")}
    as_bytes = {name: x.astype(np.uint8) for name, x in counts.items()}
    scaled = load_npz(tmp_path / "bytes.npz", arrays | as_bytes).train["x"]
    unscaled = load_npz(tmp_path / "counts.npz", arrays | counts).train["x"]
    np.testing.assert_array_equal(scaled, counts["x_train"].astype(np.float32) / np.float32(255))
    np.testing.assert_array_equal(unscaled, counts["x_train"].astype(np.float32))


def test_npz_accepts_any_memory_layout(tmp_path):
    x = np.asfortranarray(np.ones((4, 3), dtype=">f4"))
    y = np.array([0, -100, 2, 0], dtype=np.int8)
    dataset = load_npz(tmp_path / "data.npz", {"x_train": x, "y_train": y, "x_test": x, "y_test": y})
    assert_well_formed(dataset)
    assert dataset.train["y"].shape == (4,) and dataset.num_classes == 3


INPUTS = "needs (N, ...) with at least one example and one input"
LABELS = "needs class labels from 0 to 1048575, or -100 for no label"
FAULTS = {
    "text x": ({"x_train": np.array([["a"]] * 6)}, "x_train holds <U1; needs floating-point or integer numbers"),
    "flat x": ({"x_test": np.ones(3)}, f"x_test has shape (3,); {INPUTS}"),
    "no example": ({"x_test": np.ones((0, 2)), "y_test": np.ones(0, int)}, f"x_test has shape (0, 2); {INPUTS}"),
    "nan": ({"x_test": np.array([[1, 1], [1, np.nan], [1, 1]])}, "x_test[1, 1] is nan; needs finite float32 numbers"),
    "too large": ({"x_test": np.array([[1, 1e39]] * 3)}, "x_test[0, 1] is 1e+39; needs finite float32 numbers"),
    "real y": ({"y_train": np.ones(6)}, "y_train holds float64; needs integer class labels"),
    "short y": ({"y_train": np.ones(5, int)}, "y_train has shape (5,); needs (6,), a label for each example"),
    "scalar y": ({"y_train": np.array(1)}, "y_train has shape (); needs (6,), a label for each example"),
    "negative y": ({"y_test": np.array([0, -100, -1])}, f"y_test[2] is -1; {LABELS}"),
    "huge y": ({"y_test": np.array([0, 1, 2**31])}, f"y_test[2] is 2147483648; {LABELS}"),
    "ignored y": ({"y_test": np.full(3, -100)}, "y_test holds only the ignored label -100; needs class labels from 0"),
    "x shapes": ({"x_test": np.ones((3, 5))}, "x_train has examples of shape (2, 2), x_test (5,); needs one shape"),
    "y shapes": ({"y_test": np.zeros((3, 2), int)}, "y_test has shape (3, 2); needs (3,), a label for each example"),
    "x scales": (
        {"x_test": np.ones((3, 2, 2), np.uint8)},
        "x_train is float64, x_test uint8; only uint8 is divided by 255, so both or neither must be uint8",
    ),
}


@pytest.mark.parametrize(("changed", "message"), FAULTS.values(), ids=FAULTS)
def test_a_malformed_npz_array_is_named(tmp_path, changed, message):
    path = tmp_path / "data.npz"
    with pytest.raises(InputError) as error:
        load_npz(path, npz_arrays() | changed)
    assert str(error.value) == f"--data-path {path}: {message}"


def test_missing_npz_arrays_are_named_with_those_present(tmp_path):
    path = tmp_path / "data.npz"
    message = r"data\.npz: has no x_test, y_test, only y_train, inputs, x_train; needs an \.npz"
    with pytest.raises(InputError, match=message):
        load_npz(path, {"y_train": np.ones(3), "inputs": np.ones(3), "x_train": np.ones(3)})


class Bomb:
    """Object that fails the test when it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was run",)


@pytest.mark.parametrize("kind", ["text", "empty", "pickle", "npy", "truncated"])
def test_files_of_other_formats_are_refused(tmp_path, kind):
    path = tmp_path / "data.npz"
    np.savez(path, **npz_arrays())
    content = {
        "text": b"x_train,y_train",
        "empty": b"",
        "pickle": pickle.dumps(Bomb()),
        "npy": b"\x93NUMPY\x01\x00",
        "truncated": path.read_bytes()[:-100],
    }
    path.write_bytes(content[kind])
    with pytest.raises(InputError, match=r"data\.npz: is not an \.npz file; needs an \.npz file with x_train, "):
        load(TrainConfig(dataset="npz", data_path=str(path)))


def test_npz_never_unpickles(tmp_path):
    pickled = np.empty(6, dtype=object)
    pickled[0] = Bomb()
    message = r"data\.npz: y_train cannot be read \(Object arrays cannot .*\); needs an array of numbers$"
    with pytest.raises(InputError, match=message):
        load_npz(tmp_path / "data.npz", npz_arrays() | {"y_train": pickled})


def test_a_corrupt_npz_array_is_named(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, **npz_arrays())
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("y_test.npy").header_offset + 200
    content = bytearray(path.read_bytes())
    content[start] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"data\.npz: y_test cannot be read \(.+\); needs an array of numbers$"):
        load(TrainConfig(dataset="npz", data_path=str(path)))


@pytest.mark.parametrize("dataset", ["npz", "names"])
def test_nobody_waits_for_a_pipe_or_reads_a_device(dataset, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        config = TrainConfig(dataset=dataset, model="char_mlp" if dataset == "names" else "mlp", data_path=str(path))
        with pytest.raises(InputError, match=rf"^--data-path {path}: is a pipe, .*; must be a regular file$"):
            load(config)


@pytest.mark.parametrize("path", ["a\0b.npz", "x" * 300])
def test_a_path_that_no_file_can_have_is_refused(path):
    with pytest.raises(InputError, match=r"^--data-path .*: (embedded null byte|file name too long); needs an .npz"):
        load(TrainConfig(dataset="npz", data_path=path))


def test_an_array_larger_than_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    """A compressed array of zeros may be a thousandth of its size."""
    monkeypatch.setattr("jaxddp.data.memory.memory", lambda: 2**20)
    np.savez_compressed(tmp_path / "data.npz", **npz_arrays() | {"x_train": np.zeros((2**18, 2, 2))})
    message = r"^--data-path .*data\.npz: x_train: the numbers take 0 GiB, and this machine has 0 GiB$"
    with pytest.raises(InputError, match=message):
        load(TrainConfig(dataset="npz", data_path=str(tmp_path / "data.npz")))
