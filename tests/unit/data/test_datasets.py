"""Datasets: arrays for the trainers, and errors for malformed files."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from jaxddp.config import TrainConfig
from jaxddp.data import datasets
from jaxddp.data.datasets import Dataset, load
from jaxddp.errors import InputError

TEN_NAMES = ["ada", "ben", "cleo", "dora", "emil", "finn", "gus", "hal", "ida", "jo"]
LINES = "\n".join(TEN_NAMES)


def names_config(path: Path | None = None, context_length: int = 3) -> TrainConfig:
    data_path = None if path is None else str(path)
    return TrainConfig(dataset="names", model="char_mlp", data_path=data_path, context_length=context_length)


def read(dataset: Dataset, split: str) -> list[str]:
    """Return the names that the rows of a split spell, after checking each context."""
    names, name = [], ""
    (context_length,) = dataset.input_shape
    for context, label in zip(*(getattr(dataset, split)[key] for key in "xy"), strict=True):
        before = "".join(dataset.vocab[i] for i in context)
        assert before == ("." * context_length + name)[-context_length:]
        if label == 0:
            names.append(name)
            name = ""
        else:
            name += dataset.vocab[label]
    assert name == ""
    return names


def assert_well_formed(dataset: Dataset) -> None:
    for split in (dataset.train, dataset.test):
        assert split.keys() == {"x", "y"}
        assert split["x"].shape == (len(split["y"]), *dataset.input_shape)
        assert split["x"].dtype == (np.float32 if dataset.vocab is None else np.int32)
        assert split["y"].dtype == np.int32
        assert split["x"].flags.c_contiguous and split["x"].flags.writeable
        assert split["y"].max() < dataset.num_classes


def test_digests_tell_every_change_of_the_data():
    def digests(change=lambda x: x, split="train"):
        dataset = load(TrainConfig(dataset="linear", num_examples=20))
        arrays = getattr(dataset, split)
        arrays["x"] = change(arrays["x"])
        return dataset.digests

    def last_bit(x):
        x.view(np.uint32)[-1, -1] ^= 1
        return x

    whole = digests()
    assert digests() == whole == load(TrainConfig(dataset="linear", num_examples=20)).digests
    assert digests(lambda x: np.asfortranarray(x)) == whole
    for change in (last_bit, lambda x: x[::-1], lambda x: x.reshape(20, 2, 5), lambda x: x.view(np.int32)):
        assert digests(change)["train"] != whole["train"]
        assert digests(change)["test"] == whole["test"]
    assert digests(lambda x: -x, "test")["test"] != whole["test"]


def test_digits_have_a_fixed_split():
    digits = load(TrainConfig(seed=7))
    assert_well_formed(digits)
    assert (digits.name, digits.num_classes, digits.input_shape, digits.vocab) == ("digits", 10, (8, 8), None)
    assert len(digits.train["y"]) == 1437 and len(digits.test["y"]) == 360
    for split in (digits.train, digits.test):
        assert split["x"].min() == 0 and split["x"].max() == 1
        assert np.bincount(split["y"]).min() > 0.07 * len(split["y"])  # no digit is rare
    np.testing.assert_array_equal(digits.test["x"], load(TrainConfig(seed=8)).test["x"])


def test_digits_contain_each_example_of_scikit_learn_once():
    from sklearn.datasets import load_digits

    digits = load(TrainConfig())
    rows = np.concatenate([digits.train["x"], digits.test["x"]]).reshape(1797, 64) * 16
    labelled = np.column_stack([rows, np.concatenate([digits.train["y"], digits.test["y"]])])
    expected = np.column_stack([load_digits().data, load_digits().target])
    np.testing.assert_array_equal(*(rows[np.lexsort(rows.T)] for rows in (labelled, expected)))


@pytest.mark.parametrize(("num_examples", "num_test"), [(1, 1), (4, 1), (10, 2), (1000, 200)])
def test_linear_has_the_configured_sizes(num_examples, num_test):
    config = TrainConfig(dataset="linear", num_examples=num_examples, num_features=6, num_classes=4)
    problem = load(config)
    assert_well_formed(problem)
    assert (problem.num_classes, problem.input_shape) == (4, (6,))
    assert (len(problem.train["y"]), len(problem.test["y"])) == (num_examples, num_test)


def test_linear_is_learnable_and_follows_the_seed():
    problem, same, other = (load(TrainConfig(dataset="linear", seed=seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(problem.train["x"], same.train["x"])
    np.testing.assert_array_equal(problem.test["y"], same.test["y"])
    assert not np.array_equal(problem.train["x"], other.train["x"])
    onehot = np.eye(3)[problem.train["y"]]
    weight, *_ = np.linalg.lstsq(problem.train["x"], onehot, rcond=None)
    assert np.mean((problem.test["x"] @ weight).argmax(1) == problem.test["y"]) > 0.8


def test_linear_equals_torchs_draws():
    problem = load(TrainConfig(dataset="linear", seed=5))
    generator = torch.Generator().manual_seed(5)
    weight, x, noise = (torch.randn(*shape, generator=generator) for shape in [(10, 3), (1200, 10), (1200, 3)])
    y = (x @ weight + 0.1 * noise).argmax(1)
    inputs = np.concatenate([problem.train["x"], problem.test["x"]])
    # float32 logarithms and cosines; measured: 1.4e-6 with torch's kernels for processors without AVX2
    np.testing.assert_allclose(inputs, x, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.concatenate([problem.train["y"], problem.test["y"]]), y)


def test_the_bundled_names_are_sorted_unique_and_lower_case():
    content = datasets.NAMES_FILE.read_bytes()
    names = content.decode("ascii").split("\n")
    assert names.pop() == ""
    assert names == sorted(set(names)) and 900 < len(names) < 1200
    assert all(re.fullmatch("[a-z]{2,}", name) for name in names)


@pytest.mark.parametrize("context_length", [1, 3, 12])
def test_names_contain_each_name_of_the_file_once(context_length):
    dataset = load(names_config(context_length=context_length))
    assert_well_formed(dataset)
    assert dataset.vocab == ".abcdefghijklmnopqrstuvwxyz" and dataset.num_classes == 27
    train, test = read(dataset, "train"), read(dataset, "test")
    listed = datasets.NAMES_FILE.read_text().split()
    assert sorted(train + test) == listed
    assert len(test) == len(listed) // 10
    assert len({name[0] for name in test}) > 10  # spread over the alphabet


def test_copies_of_a_name_stay_in_one_split(tmp_path):
    path = tmp_path / "names.txt"
    path.write_text("\n".join(3 * TEN_NAMES))
    dataset = load(names_config(path))
    train, test = read(dataset, "train"), read(dataset, "test")
    assert len(test) == 3 and len(train) == 27 and not set(train) & set(test)


@pytest.mark.parametrize(
    "content",
    [
        LINES,
        f"{LINES}\n",
        f"{LINES}\n\n \n",
        LINES.replace("\n", "\r\n") + "\r\n",
        f"\ufeff{LINES}",
        LINES.replace("\n", " \n"),
    ],
    ids=["bare", "newline", "blank end", "crlf", "bom", "trailing spaces"],
)
def test_names_files_of_any_editor_are_read(tmp_path, content):
    path = tmp_path / "names.txt"
    path.write_bytes(content.encode())
    dataset = load(names_config(path))
    assert dataset.vocab == "." + "".join(sorted(set("".join(TEN_NAMES))))
    assert sorted(read(dataset, "train") + read(dataset, "test")) == TEN_NAMES


def test_names_in_other_scripts_keep_dot_as_id_0(tmp_path):
    path = tmp_path / "names.txt"
    names = [*TEN_NAMES, "anne-marie", "o'neil", "mary ann", "zoë", "नेहा", "さくら"]
    path.write_text("\n".join(names), encoding="utf-8")
    dataset = load(names_config(path))
    assert dataset.vocab is not None and dataset.vocab.startswith(". '-")
    assert sorted(read(dataset, "train") + read(dataset, "test")) == sorted(names)


def with_line_3(line: str) -> bytes:
    return "\n".join([*TEN_NAMES[:2], line, *TEN_NAMES[2:]]).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (with_line_3(""), "line 3 is blank; remove it, so that each line holds one name"),
        (with_line_3("  "), "line 3 is blank; remove it, so that each line holds one name"),
        (b"\n" + with_line_3("zoe"), "line 1 is blank; remove it, so that each line holds one name"),
        (with_line_3("a.b"), "line 3 has a '.', which marks the end of a name; remove it"),
        (with_line_3("a\tb"), "line 3 has the control character U+0009; remove it"),
        (with_line_3("a\rb"), "line 3 has the control character U+000D; remove it"),
        (with_line_3("a\u2028b"), "line 3 has the control character U+2028; remove it"),
        (with_line_3("a" * 101), "line 3 has 101 characters; shorten it to 100, one name per line"),
        (with_line_3("zoe") + b"\nzo\xeb", "line 12 is not UTF-8; save the file as UTF-8"),
        ("\n".join(TEN_NAMES).encode("utf-16"), "line 1 is not UTF-8; save the file as UTF-8"),
        (b"", "is empty; needs at least 10 names, one per line"),
        (b"\r\n\n", "is empty; needs at least 10 names, one per line"),
        ("\n".join(3 * TEN_NAMES[1:]).encode(), "has 9 different names; needs at least 10"),
    ],
)
def test_a_malformed_name_is_reported_with_its_line(tmp_path, content, message):
    path = tmp_path / "names.txt"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        load(names_config(path))
    assert str(error.value) == f"--data-path {path}: {message}"


def test_a_name_of_100_characters_is_accepted(tmp_path):
    path = tmp_path / "names.txt"
    path.write_bytes(with_line_3("a" * 100))
    assert load(names_config(path)).num_classes > 1


@pytest.mark.parametrize("dataset", ["names", "npz"])
@pytest.mark.parametrize(
    ("file", "reason"), [("missing", "no such file or directory"), ("", "is a directory")], ids=["missing", "directory"]
)
def test_an_unreadable_file_is_an_error_with_the_reason(tmp_path, dataset, file, reason):
    path = tmp_path / file
    wanted = {"names": "a UTF-8 text file with one name per line", "npz": "an .npz file with x_train, y_train, .*"}
    config = names_config(path) if dataset == "names" else TrainConfig(dataset="npz", data_path=str(path))
    with pytest.raises(InputError, match=f"^--data-path {re.escape(str(path))}: {reason}; needs {wanted[dataset]}$"):
        load(config)


def test_the_place_of_a_file_whose_name_is_not_utf8_can_be_printed_and_drawn():
    place = datasets.place(TrainConfig(dataset="npz", data_path=os.fsdecode(b"sp\xe4.npz")))
    assert place == "sp?.npz"
    assert place.encode().decode() == place
