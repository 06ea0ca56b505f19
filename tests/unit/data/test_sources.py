"""Sources: what they read is what torch's DataLoader collates, wherever it lies; bad examples get one line."""

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from jaxddp import data
from jaxddp.config import TrainerConfig
from jaxddp.data.batches import from_arrays, widened
from jaxddp.data.run_data import load_data
from jaxddp.data.sources import as_source, generator
from jaxddp.errors import InputError
from jaxddp.program import Program

INDICES = np.array([[4, 0, 2], [1, 1, 3]])


class Mixed(Dataset[Any]):
    """Items with everything that torch's default collate takes; its integers of 16 bits become int64."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        pair = (torch.full((2, 3), float(index)), np.arange(3, dtype=np.uint16) * index)
        return {"pair": pair, "label": index % 3, "weight": index / 2, "flag": index > 2}


@pytest.mark.parametrize("items", [Mixed(), Subset(Mixed(), [4, 3, 2, 1, 0]), [Mixed()[i] for i in range(5)]])
def test_items_are_stacked_as_torchs_loader_collates_them(items: Any) -> None:
    (expected,) = DataLoader(items, batch_size=6, sampler=INDICES.ravel().tolist())
    batch = from_arrays(as_source(items).take(INDICES, 0))
    assert batch.keys() == expected.keys() and type(batch["pair"]) is tuple
    for name, array, tensor in [
        *((name, batch[name], expected[name]) for name in ("label", "weight", "flag")),
        *(("pair", *both) for both in zip(batch["pair"], expected["pair"], strict=True)),
    ]:
        assert array.shape == (2, 3, *tensor.shape[1:]) and array.dtype == widened(tensor.numpy()).dtype, name
        np.testing.assert_array_equal(array.reshape(tensor.shape), tensor, name)


def test_pairs_as_of_a_tensor_dataset_keep_their_order() -> None:
    pairs = TensorDataset(torch.arange(10).reshape(5, 2), torch.arange(5))
    x, y = from_arrays(as_source(pairs).take(INDICES, 0))
    np.testing.assert_array_equal(x, INDICES[..., None] * 2 + [0, 1])
    np.testing.assert_array_equal(y, INDICES)


def test_several_items_at_once_are_asked_for_where_the_data_can() -> None:
    asked = []

    class Batched(Mixed):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            asked.append(indices)
            return [self[index] for index in indices]

    as_source(Batched()).take(INDICES, 0)
    assert asked[-1] == INDICES.ravel().tolist()


# ---- files


def test_windows_of_tokens_equal_slices_of_the_file(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 2**16, 1000).astype(np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    for length, stride in ((16, 16), (16, 5), (999, 1), (10, 100)):
        windows = data.token_file(tmp_path / "tokens.bin", length, stride)
        assert len(windows) == len(range(0, len(tokens) - length, stride))
        indices = np.array([[0, len(windows) - 1]])
        batch = as_source(windows).take(indices, 0)
        starts = indices[..., None] * stride + np.arange(length)
        np.testing.assert_array_equal(batch["x"], tokens[starts])
        np.testing.assert_array_equal(batch["y"], tokens[starts + 1])
        assert batch["x"].dtype == np.int32
    (tmp_path / "bytes.bin").write_bytes(bytes(range(9)))
    np.testing.assert_array_equal(data.token_file(tmp_path / "bytes.bin", 4, dtype="uint8")[1]["y"], [5, 6, 7, 8])


def test_arrays_of_files_are_mapped_and_equal(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).standard_normal((5, 3, 2)), np.arange(5)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "stored.npz", x=x, fortran=np.asfortranarray(x), y=y)
    np.savez_compressed(tmp_path / "small.npz", x=x, y=y)
    stored, small = data.array_file(tmp_path / "stored.npz"), data.array_file(tmp_path / "small.npz")
    assert all(isinstance(array, np.memmap) for array in (*stored.values(), data.array_file(tmp_path / "x.npy")))
    for arrays in (stored, small, {"x": data.array_file(tmp_path / "x.npy"), "y": y}):
        batch = as_source(arrays).take(INDICES, 0)
        np.testing.assert_array_equal(batch["x"], x[INDICES])
        np.testing.assert_array_equal(batch["y"], INDICES)
    np.testing.assert_array_equal(stored["fortran"], x)


def test_images_have_torchvisions_order_and_labels(tmp_path: Path) -> None:
    files = ["b/2.png", "b/10.PNG", "a/deep/z.jpg", "a/c.bmp"]  # torchvision sorts folders, then names, as text
    for shade, file in enumerate(files):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (3, 2), shade * 50).save(tmp_path / file)
    (tmp_path / "a/readme.txt").write_text("no image")
    images = data.image_folder(tmp_path)
    batch = as_source(images).take(np.arange(4), 0)
    assert images.classes == ["a", "b"] and batch["x"].shape == (4, 2, 3, 3) and batch["x"].dtype == np.uint8
    np.testing.assert_array_equal(batch["y"], [0, 0, 1, 1])
    assert np.abs(batch["x"][:, 0, 0, 0].astype(int) - [150, 100, 50, 0]).max() <= 1  # jpg


def test_rows_of_parquet_files_are_read_across_files_and_groups(tmp_path: Path) -> None:
    for number, rows in enumerate((range(7), range(7, 10))):
        table = pa.table({"x": [[row, row + 0.5] for row in rows], "y": list(rows), "text": ["t"] * len(rows)})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=2)
    source = as_source(data.parquet(tmp_path))
    batch = source.take(np.array([9, 0, 5, 6, 7]), 0)
    assert len(source) == 10 and batch.keys() == {"x", "y"}
    np.testing.assert_array_equal(batch["x"][:, 1], [9.5, 0.5, 5.5, 6.5, 7.5])
    np.testing.assert_array_equal(batch["y"], [9, 0, 5, 6, 7])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda folder: data.token_file(folder / "none.bin", 4), "no such file"),
        (lambda folder: data.token_file(folder / "odd.bin", 4), "has 7 bytes, which are no uint16 numbers"),
        (lambda folder: data.token_file(folder / "odd.bin", 7, dtype="uint8"), "has 7 tokens; a window of 7 needs 8"),
        (lambda folder: data.token_file(folder / "odd.bin", 0), "length 0, stride 0: must be at least 1"),
        (lambda folder: data.array_file(folder / "none.npy"), "must be a .npy or .npz file"),
        (lambda folder: data.array_file(folder / "odd.bin"), "must be a .npy or .npz file"),
        (lambda folder: data.array_file(folder / "objects.npz"), "must be a .npy or .npz file"),
        (lambda folder: data.image_folder(folder / "none"), "no such folder"),
        (lambda folder: data.image_folder(folder), "empty: has no images"),
        (lambda folder: data.parquet(folder), r"has no files \*.parquet"),
        (lambda folder: data.parquet(folder / "odd.bin"), "odd.bin: Parquet"),
    ],
)
def test_bad_files_are_refused_in_a_line(tmp_path: Path, call: Callable[[Path], Any], message: str) -> None:
    (tmp_path / "odd.bin").write_bytes(b"1234567")
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "objects.npz", x=np.array([None]))
    with pytest.raises(InputError, match=message) as caught:
        call(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("nested", [False, True])
def test_views_of_mapped_arrays_stay_on_the_disk(nested: bool, tmp_path: Path) -> None:
    """2 TB, if they were read."""
    (tmp_path / "tokens.bin").touch()
    os.truncate(tmp_path / "tokens.bin", 2**31)
    windows = np.lib.stride_tricks.sliding_window_view(np.memmap(tmp_path / "tokens.bin", np.uint16, "r"), 1024)
    examples = ({"x": windows}, None) if nested else {"x": windows}
    read = load_data(Program("run.py", {"train_data": lambda: examples}), TrainerConfig())
    assert len(read.train) == len(windows) and read.digests
    assert read.example()["(0) > x" if nested else "x"].shape == (2, 1024)


def test_a_token_file_that_is_cut_short_is_told_of(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    windows = data.token_file(tmp_path / "tokens.bin", 10)
    os.truncate(tmp_path / "tokens.bin", 100)
    with pytest.raises(InputError, match="window 5 cannot be read; the file has become shorter"):
        windows[5]


# ---- digests


def test_the_digest_of_arrays_in_memory_is_that_of_all_they_hold() -> None:
    arrays = {"y": np.arange(3), "x": np.ones((3, 2), np.float32)[:, ::-1]}
    expected = hashlib.sha256()
    for name in "xy":
        expected.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape}\n".encode())
        expected.update(arrays[name].tobytes())
    assert as_source(arrays).digest() == expected.hexdigest() == as_source(arrays).digest(verify=True)


def test_digests_of_files_sample_and_verify(tmp_path: Path) -> None:
    path, array = tmp_path / "tokens.bin", np.arange(100_000, dtype=np.uint16)

    def digests() -> list[str]:
        array.tofile(path)
        sources = [as_source(data.token_file(path, 10)), as_source({"x": np.memmap(path, np.uint16, "r")})]
        return [source.digest(verify) for source in sources for verify in (False, True)]

    before = digests()
    assert len(set(before)) == 4 and digests() == before
    array[12_345] += 1  # between the samples
    assert [new == old for new, old in zip(digests(), before, strict=True)] == [True, False, True, False]
    array[0] += 1
    assert all(new != old for new, old in zip(digests(), before, strict=True))


def test_items_that_differ_at_each_reading_have_a_digest_of_their_kind() -> None:
    class Random(Mixed):
        def __getitem__(self, index: int) -> Any:
            return {"x": np.random.default_rng().standard_normal(self.width), "y": index}

        width = 3

    class Wider(Random):
        width = 4

    assert as_source(Random()).digest() == as_source(Random()).digest() != as_source(Wider()).digest()
    assert as_source(Mixed()).digest() != as_source(Subset(Mixed(), [4, 3, 2, 1, 0])).digest()


# ---- augmentation and collate


def crop(example: Any, rng: np.random.Generator) -> Any:
    return {**example, "noise": rng.standard_normal(2)}


def test_numbers_that_augment_adds_get_the_dtype_of_the_run() -> None:
    values = {
        "train_data": lambda: {"x": np.ones(2)},
        "augment": lambda x, rng: x | {"noise": np.float32(rng.random())},
    }
    taken = load_data(Program("run.py", values), TrainerConfig(dtype="float64")).train.take(np.arange(2), 0)
    assert {name: x.dtype for name, x in taken.items()} == {"x": np.float64, "noise": np.float64}


def test_augmentation_depends_on_seed_epoch_and_example_alone() -> None:
    arrays = {"x": np.arange(6.0)}

    def noise(indices: Any, epoch: int, seed: int = 0) -> np.ndarray:
        return as_source(arrays, augment=crop, seed=seed).take(np.array(indices), epoch)["noise"]

    once = noise([0, 1, 2, 3, 4, 5], 3)
    np.testing.assert_array_equal(noise([[4, 2], [0, 4]], 3), once[[[4, 2], [0, 4]]])
    np.testing.assert_array_equal(once[2], generator(0, 3, 2).standard_normal(2))

    def in_place(example: Any, rng: np.random.Generator) -> Any:
        example["x"] += rng.standard_normal()
        return example

    for kept in ({"x": np.zeros((3, 2))}, [{"x": np.zeros(2)} for _ in range(3)]):
        first, again = (as_source(kept, augment=in_place).take(np.arange(3), 0) for _ in range(2))
        np.testing.assert_array_equal(first["x"], again["x"])
    others = (noise([2], 4), noise([2], 3, seed=1), noise([3], 3), noise([3], 2))
    assert all((other != once[2]).all() for other in others)


def pad(examples: list[Any]) -> Any:
    longest = max(len(example["ids"]) for example in examples)
    return {"ids": np.stack([np.pad(example["ids"], (0, longest - len(example["ids"]))) for example in examples])}


def test_collate_gets_examples_as_the_data_have_them() -> None:
    ragged = [{"ids": np.ones(length, np.int64)} for length in (3, 1, 2)]
    batch = as_source(ragged, collate=pad).take(np.array([[1], [2]]), 0)
    np.testing.assert_array_equal(batch["ids"], [[[1, 0]], [[1, 1]]])


# ---- bad data


class Bad:
    """Data with a fault at example 3."""

    def __init__(self, fault: Any):
        self.fault = fault

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            if isinstance(self.fault, BaseException):
                raise self.fault
            return self.fault
        return {"x": np.zeros(2), "y": 0}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (OSError("disk on fire\nand smoke"), "example 3: OSError: disk on fire$"),
        (SystemExit(0), "example 3: SystemExit: 0"),
        (IndexError("3"), r"has no example 3, and its length is 6 \(IndexError: 3\)"),
        ({"x": np.zeros(3), "y": 0}, r"example 3: x is float64 \(3,\), of example 1 float64 \(2,\)"),
        ({"x": np.zeros(2), "y": 0.5}, r"example 3: y is float64 \(\), of example 1 int64 \(\)"),
        ({"x": np.zeros(2)}, "example 3: has x, example 1 x, y; all must have the same entries"),
        ({"x": np.array([0, np.nan]), "y": 0}, r"example 3: x\[1\] is nan; must be a number"),
        ("text", r"data\[3\]: must be a dictionary or tuple of arrays, and is str"),
        (None, r"data\[3\]: must be a dictionary or tuple of arrays, and is NoneType"),
    ],
)
def test_a_bad_example_is_one_line_with_its_index(fault: Any, message: str) -> None:
    source = as_source(Bad(fault))
    source.take(np.array([0, 1, 2]), 0)
    with pytest.raises(InputError, match=rf"^data: {message}|^{message}"):
        source.take(np.array([1, 3, 4]), 0)


class Lying(Mixed):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(range(5)[index])


class Sizeless(Mixed):
    def __len__(self) -> int:
        raise NotImplementedError("how many?")


class Short(Mixed):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[0], self[1]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Sizeless(), "__len__: NotImplementedError: how many?"),
        (Short(), "gives 2 examples for 1 indices"),
        (Lying(), "has no example 6, and its length is 7"),
        ([], "has no examples"),
        ({"x": np.zeros(0)}, "has no examples"),
        ({"x": np.zeros(3), "y": np.zeros(2)}, "arrays of different lengths: {'x': 3, 'y': 2}"),
        ({"x": np.zeros(3), "y": 1.0}, "arrays of different lengths: {'x': 3, 'y': 0}"),
        (
            (i for i in range(3)),
            "or have __len__ and __getitem__, and is generator; streams are for train_data()",
        ),
        (None, "and is NoneType"),
    ],
)
def test_data_that_are_none_are_refused(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=rf"^train_data\(\): .*{re.escape(message)}"):
        as_source(given, "train_data()")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": lambda example, rng: 1 // 0}, "data: augment: example 2: ZeroDivisionError: integer"),
        ({"collate": lambda examples: 1 // 0}, "data: collate, examples 2 to 3: ZeroDivisionError: integer"),
        (
            {"collate": lambda examples: {"x": np.zeros(3)}},
            "examples 2 to 3: its batch has 3 entries; must have 2",
        ),
        ({"collate": lambda examples: np.zeros(2)}, "must be a dictionary or tuple of arrays, and is ndarray"),
    ],
)
def test_errors_of_the_users_functions_are_one_line(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        as_source({"x": np.zeros(5)}, **options).take(np.array([2, 3]), 0)
