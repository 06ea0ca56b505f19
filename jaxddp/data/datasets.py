"""Datasets: handwritten digits, a linear problem, names, and the user's arrays. N is the number of examples."""

import unicodedata
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from jaxddp.config import TrainConfig
from jaxddp.config.choices import IGNORE_INDEX
from jaxddp.config.options import BuiltInOptions
from jaxddp.data.digits import digits
from jaxddp.data.memory import check_memory
from jaxddp.data.sources.digests import array_digest
from jaxddp.data.torch_rng import Generator
from jaxddp.errors import InputError, reason
from jaxddp.files import check_regular

Array = NDArray[Any]
Arrays = dict[str, Array]
"""x: float32 or, for characters, int32 (N, ...). y: int32 (N,)."""

NUM_DIGITS_TRAIN = 1437  # of 1,797
LABEL_NOISE = 0.1  # of the linear problem; it flips some labels near a boundary
NAMES_FILE = Path(__file__).with_name("names.txt")
END = "."  # end of a name, and padding before its start; its id is 0
MAX_NAME_LENGTH = 100
MIN_NAMES = 10
MAX_CLASSES = 2**20  # a larger label is most likely a mistake, and its model would not fit into memory
NPZ_ARRAYS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test examples.

    Attributes:
        name: value of --dataset.
        train: training examples, x (N, *input_shape) and y (N,).
        test: test examples, likewise.
        num_classes: number of classes; labels are 0 to num_classes - 1, or -100 to be ignored.
        input_shape: shape of one example's x.
        vocab: for names, the characters in the order of their ids; otherwise None.
    """

    name: str
    train: Arrays
    test: Arrays
    num_classes: int
    input_shape: tuple[int, ...]
    vocab: str | None = None

    def astype(self, dtype: str) -> "Dataset":
        """Return the dataset with floating-point inputs cast to `dtype`."""

        def cast(arrays: Arrays) -> Arrays:
            return {name: x.astype(dtype, copy=False) if x.dtype.kind == "f" else x for name, x in arrays.items()}

        return replace(self, train=cast(self.train), test=cast(self.test))

    @cached_property
    def digests(self) -> dict[str, str]:
        """SHA-256 of the training and of the test examples: of names, types, shapes and values."""
        return {"train": array_digest(self.train), "test": array_digest(self.test)}


def load(config: TrainConfig) -> Dataset:
    """Load the dataset that `config` names; jaxddp and torch_ref get equal arrays.

    - digits: scikit-learn's 1,797 handwritten digits; x (N, 8, 8) from 0 to 1.
    - linear: x (N, num_features) drawn from the seed; y the index of the largest of num_classes noisy scores.
    - names: x (N, context_length) ids of characters; y the id of the next character.
    - npz: x_train, y_train, x_test, y_test from a file. uint8 x, as of images, becomes x / 255; other
      numbers are unchanged. Labels of -100 are ignored.

    Returns:
        Dataset with x float32 (names: int32) and y int32; only `linear` depends on the seed.

    Raises:
        InputError: a file is missing or malformed; the message names the place and what would be right.

    >>> digits = load(TrainConfig(dataset="digits"))
    >>> digits.train["x"].shape, digits.test["x"].shape, digits.num_classes
    ((1437, 8, 8), (360, 8, 8), 10)
    """
    loaders = {"digits": _digits, "linear": _linear, "names": _names, "npz": _npz}
    return loaders[config.dataset](config)


def place(options: BuiltInOptions) -> str:
    """Return the name of the dataset, or of its file, as it can be printed and drawn.

    >>> place(TrainConfig(dataset="npz", data_path="data/mine.npz"))
    'mine.npz'
    """
    name = options.dataset if options.data_path is None else Path(options.data_path).name
    return name.encode(errors="replace").decode()  # a name may be no UTF-8


def _digits(config: TrainConfig) -> Dataset:
    """Load the handwritten digits: x (N, 8, 8) from 0 to 1, in a fixed shuffled order."""
    arrays = digits()
    order = Generator(0).randperm(len(arrays["y"]))
    x, y = arrays["x"][order].reshape(-1, 8, 8), arrays["y"][order].astype(np.int32)
    train, test = _split(x, y, NUM_DIGITS_TRAIN)
    return Dataset("digits", train, test, 10, (8, 8))


def _linear(config: TrainConfig) -> Dataset:
    """Draw y = argmax(x weight + 0.1 noise) with weight, x and noise from N(0, 1), in this order.

    After torch.manual_seed(seed), torch.randn draws the same numbers for the same shapes.
    """
    num_train = config.num_examples
    total = num_train + max(1, num_train // 5)
    width = config.num_features + config.num_classes
    flags = f"--num-examples {num_train} --num-features {config.num_features} --num-classes {config.num_classes}"
    check_memory(f"{flags}: the numbers", (total * width + config.num_features * config.num_classes) * 8)
    generator = Generator(config.seed)
    weight = generator.normal((config.num_features, config.num_classes))
    x = generator.normal((total, config.num_features))
    noise = generator.normal((total, config.num_classes))
    # float64, so that labels do not depend on the rounding of a BLAS.
    scores = x.astype(np.float64) @ weight + LABEL_NOISE * noise
    y = scores.argmax(axis=1).astype(np.int32)
    train, test = _split(x, y, num_train)
    return Dataset("linear", train, test, config.num_classes, (config.num_features,))


def _split(x: Array, y: Array, num_train: int) -> tuple[Arrays, Arrays]:
    return {"x": x[:num_train], "y": y[:num_train]}, {"x": x[num_train:], "y": y[num_train:]}


def _names(config: TrainConfig) -> Dataset:
    """Load names: each character of a name, and its end, is predicted from the `context_length` before it.

    A tenth of the distinct names is for testing; all copies of a name are in the same split.
    """
    names = _read_names(NAMES_FILE if config.data_path is None else Path(config.data_path))
    vocab = END + "".join(sorted(set("".join(names))))
    characters = sum(map(len, names)) + len(names)
    check_memory(f"--context-length {config.context_length}: the contexts", characters * config.context_length * 4)
    different = list(dict.fromkeys(names))
    order = Generator(0).randperm(len(different))
    tested = {different[i] for i in order[: len(different) // 10]}
    train = _next_character([name for name in names if name not in tested], vocab, config.context_length)
    test = _next_character([name for name in names if name in tested], vocab, config.context_length)
    return Dataset("names", train, test, len(vocab), (config.context_length,), vocab)


def _next_character(names: list[str], vocab: str, context_length: int) -> Arrays:
    """Return x (N, context_length) and y (N,); "ab" with context 2 gives (.., a), (.a, b), (ab, .)."""
    ids = {character: i for i, character in enumerate(vocab)}
    y = np.array([ids[character] for name in names for character in name + END], dtype=np.int32)
    place = np.concatenate([np.arange(len(name) + 1) for name in names])  # of each character in its name
    # Characters further back than `place` belong to the previous name.
    x = [np.where(place >= back, np.roll(y, back), 0) for back in range(context_length, 0, -1)]
    return {"x": np.stack(x, axis=1).astype(np.int32), "y": y}


def _read_names(path: Path) -> list[str]:
    """Read one name per line; accept a byte order mark, CRLF, and spaces around a name."""
    with _open(path, "a UTF-8 text file with one name per line") as file:
        content = file.read()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(f"--data-path {path}: line {line} is not UTF-8; save the file as UTF-8") from None
    # Not splitlines(), which also splits at control characters.
    names = [line.strip(" ") for line in text.replace("\r\n", "\n").rstrip(" \n").split("\n")]
    if names == [""]:
        raise InputError(f"--data-path {path}: is empty; needs at least {MIN_NAMES} names, one per line")
    for number, name in enumerate(names, start=1):
        if fault := _fault_of_name(name):
            raise InputError(f"--data-path {path}: line {number} {fault}")
    if len(set(names)) < MIN_NAMES:
        raise InputError(f"--data-path {path}: has {len(set(names))} different names; needs at least {MIN_NAMES}")
    return names


def _fault_of_name(name: str) -> str | None:
    """Describe what is wrong with a name and how to correct it; None if it is valid."""
    if not name:
        return "is blank; remove it, so that each line holds one name"
    if END in name:
        return f"has a {END!r}, which marks the end of a name; remove it"
    controls = [character for character in name if unicodedata.category(character) in ("Cc", "Zl", "Zp")]
    if controls:
        return f"has the control character U+{ord(controls[0]):04X}; remove it"
    if len(name) > MAX_NAME_LENGTH:
        return f"has {len(name)} characters; shorten it to {MAX_NAME_LENGTH}, one name per line"
    return None


def _npz(config: TrainConfig) -> Dataset:
    """Load the user's arrays, checked and scaled."""
    assert config.data_path is not None, "TrainConfig checks it"
    where = f"--data-path {config.data_path}"
    arrays = _read_npz(Path(config.data_path))
    splits = {}
    for split in ("train", "test"):
        x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
        _check_inputs(f"{where}: x_{split}", x)
        _check_labels(f"{where}: y_{split}", y, len(x))
        splits[split] = {"x": _as_float32(f"{where}: x_{split}", x), "y": y.astype(np.int32)}
    _check_splits_match(where, arrays)
    num_classes = max(int(split["y"].max()) for split in splits.values()) + 1
    return Dataset("npz", splits["train"], splits["test"], num_classes, splits["train"]["x"].shape[1:])


def _read_npz(path: Path) -> Arrays:
    """Read the four arrays, without pickle, which could run code."""
    wanted = f"an .npz file with {', '.join(NPZ_ARRAYS)}, as numpy.savez writes"
    with _open(path, wanted) as file:
        try:
            archive = np.load(file, allow_pickle=False)
            present = archive.files
        except Exception:  # a text file, a pickle, a broken zip, a single .npy
            raise InputError(f"--data-path {path}: is not an .npz file; needs {wanted}") from None
        if missing := [name for name in NPZ_ARRAYS if name not in present]:
            others = ", ".join(present) or "nothing"
            raise InputError(f"--data-path {path}: has no {', '.join(missing)}, only {others}; needs {wanted}")
        return {name: _read_array(f"--data-path {path}: {name}", archive, name) for name in NPZ_ARRAYS}


def _read_array(where: str, archive: np.lib.npyio.NpzFile, name: str) -> Array:
    assert archive.zip is not None, "open"
    sizes = {member.filename: member.file_size for member in archive.zip.infolist()}  # before compression
    check_memory(f"{where}: the numbers", sizes.get(f"{name}.npy", 0))
    try:
        return np.asarray(archive[name])
    except Exception as error:  # a dozen types, all caused by the file
        raise InputError(f"{where} cannot be read ({reason(error)}); needs an array of numbers") from None


def _check_inputs(where: str, x: Array) -> None:
    if x.dtype.kind not in "fiu":
        raise InputError(f"{where} holds {x.dtype}; needs floating-point or integer numbers")
    if x.ndim < 2 or x.size == 0:
        raise InputError(f"{where} has shape {x.shape}; needs (N, ...) with at least one example and one input")


def _check_labels(where: str, y: Array, count: int) -> None:
    if y.dtype.kind not in "iu":
        raise InputError(f"{where} holds {y.dtype}; needs integer class labels")
    if y.shape != (count,):
        raise InputError(f"{where} has shape {y.shape}; needs ({count},), a label for each example")
    counted = y != IGNORE_INDEX
    if not counted.any():
        raise InputError(f"{where} holds only the ignored label {IGNORE_INDEX}; needs class labels from 0")
    wrong = np.argwhere(counted & ((y < 0) | (y >= MAX_CLASSES)))
    if wrong.size:
        index = tuple(wrong[0])
        raise InputError(
            f"{where}{list(map(int, index))} is {y[index]}; "
            f"needs class labels from 0 to {MAX_CLASSES - 1}, or {IGNORE_INDEX} for no label"
        )


def _check_splits_match(where: str, arrays: Arrays) -> None:
    """Raise `InputError` unless training and test examples have one shape and one scale."""
    train, test = (arrays[f"x_{split}"].shape[1:] for split in ("train", "test"))
    if train != test:
        raise InputError(f"{where}: x_train has examples of shape {train}, x_test {test}; needs one shape")
    train_type, test_type = arrays["x_train"].dtype, arrays["x_test"].dtype
    if (train_type == np.uint8) != (test_type == np.uint8):
        raise InputError(
            f"{where}: x_train is {train_type}, x_test {test_type}; "
            "only uint8 is divided by 255, so both or neither must be uint8"
        )


def _as_float32(where: str, x: Array) -> Array:
    with np.errstate(over="ignore"):  # reported below
        converted = x.astype(np.float32, order="C")
    wrong = np.argwhere(~np.isfinite(converted))
    if wrong.size:
        index = tuple(wrong[0])
        raise InputError(f"{where}{list(map(int, index))} is {x[index]}; needs finite float32 numbers")
    return converted / np.float32(255) if x.dtype == np.uint8 else converted


def _open(path: Path, wanted: str) -> BinaryIO:
    check_regular(f"--data-path {path}", path)
    try:
        return path.open("rb")
    except (OSError, ValueError) as error:  # a null character in the path is a ValueError
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise InputError(f"--data-path {path}: {reason}; needs {wanted}") from None
