"""Random data files and weights, right, damaged and hostile, from a seed."""

import io
import json
import pickle
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from tests.fuzz.command_lines import damaged

NAMES = ["ada", "ben", "cleo", "dora", "emil", "finn", "gus", "hal", "ida", "jo", "kim"]
ODD = ["é", "\u202e", "\0", "\t", "\r", "\r\n", "\x85", "\u2028", "\ufeff", "😀", "a" * 101, ".", " ", ""]
ODD += ["\x1b[2J", "a\tb"]
DTYPES = ["float64", "float32", "float16", "int64", "int32", "uint8", "int8", "bool", "complex64", "U3", "S3", ">f4"]
DTYPES += ["datetime64[s]", "f4,i4"]
SHAPES: list[tuple[int, ...]] = [(8, 4), (8,), (), (0, 4), (8, 0), (8, 2, 2), (3, 4), (1,) * 30]
HEADERS = ["{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }", "{'descr': '|O', 'shape': ()}", "{"]
HEADERS += ["{'descr': '<f8', 'fortran_order': False, 'shape': (-1, 4), }", "__import__('os').system('touch ran')"]
HEADERS += ["{'descr': '<f8', 'fortran_order': False, 'shape': (" + "9" * 400 + ",), }", "(" * 5000]


class Bomb:
    """Object that makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def npz(rng: random.Random, bomb: Bomb) -> bytes:
    """Draw a .npz file, or what only has its name."""
    x, y = np.arange(32.0).reshape(8, 4), np.arange(8) % 3
    arrays: dict[str, Any] = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    for name in rng.sample(list(arrays), k=rng.choice([0, 0, 0, 1, 2])):
        arrays[name] = np.zeros(rng.choice(SHAPES), rng.choice(DTYPES))
    if rng.random() < 0.1:
        arrays[rng.choice(list(arrays))] = np.array([bomb], dtype=object)
    if rng.random() < 0.1:
        arrays[rng.choice(list(arrays))] = rng.choice([np.nan, np.inf, -1, 2**40]) * np.ones((8, 4))
    if rng.random() < 0.1:
        del arrays[rng.choice(list(arrays))]
    file = io.BytesIO()
    rng.choice([np.savez, np.savez_compressed])(file, **arrays)
    if rng.random() < 0.1:
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr(rng.choice(["../../out.npy", "/out.npy", "x_train.npy"]), member(rng))
    if rng.random() < 0.1:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for name in arrays:
                archive.writestr(f"{name}.npy", member(rng))
    return spoilt(rng, file.getvalue(), bomb)


def member(rng: random.Random) -> bytes:
    """Draw an .npy file with a hostile header, which NumPy reads as a Python literal."""
    header = rng.choice(HEADERS).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(64)


def weights(rng: random.Random, tensors: dict[str, np.ndarray], bomb: Bomb) -> bytes:
    """Draw a .safetensors file with these tensors, or what only has its name."""
    tensors = dict(tensors)
    for name in rng.sample(list(tensors), k=rng.choice([0, 0, 1])):
        shape = rng.choice([tensors[name].shape, *SHAPES])
        tensors[name] = np.full(shape, rng.choice([0, 1]), rng.choice(DTYPES[:9]))
    if rng.random() < 0.1:
        name = rng.choice(list(tensors))
        tensors[name] = np.full(tensors[name].shape, rng.choice([np.nan, np.inf]), np.float32)
    content = save(tensors)
    if rng.random() < 0.3:
        content = with_header(rng, content)
    return spoilt(rng, content, bomb)


def with_header(rng: random.Random, content: bytes) -> bytes:
    """Change the JSON header of a .safetensors file."""
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    name = rng.choice(list(header))
    field = rng.choice(["dtype", "shape", "data_offsets"])
    values: list[Any] = ["F8_E5M2", "F4", "BF16", "F99", [10**12], [-1], [2**63, 2], [0, 10**15], [5, 1], None, {}]
    header[name][field] = rng.choice([*values, 10**400])
    text = json.dumps(header).encode()
    return struct.pack("<Q", rng.choice([len(text), len(text), 0, 2**40, 2**64 - 1])) + text + content[8 + size :]


def text(rng: random.Random, bomb: Bomb) -> bytes:
    """Draw a file of names: plain, with columns between tabs, with odd characters, or in other codes."""
    lines = [rng.choice(NAMES) + rng.choice(NAMES) for _ in range(rng.choice([0, 5, 30, 30, 30]))]
    for _ in range(rng.choice([0, 0, 1, 3])):
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(NAMES) + rng.choice(ODD))
    if rng.random() < 0.2:
        lines = [f"{line}\t{number}" for number, line in enumerate(lines)]
    code = rng.choice(["utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1"])
    return spoilt(rng, "\n".join(lines).encode(code, "replace"), bomb)


def spoilt(rng: random.Random, content: bytes, bomb: Bomb) -> bytes:
    """Leave a file as it is, damage it, cut it, or put a pickle in its place."""
    how = rng.choice(["", "", "damaged", "damaged", "cut", "pickle", "random"])
    return {
        "": content,
        "damaged": damaged(rng, content),
        "cut": content[: rng.randrange(len(content) + 1)],
        "pickle": pickle.dumps(rng.choice([bomb, [bomb], {"x_train": bomb}]), protocol=rng.choice([0, 2, 4])),
        "random": rng.randbytes(rng.choice([0, 1, 7, 8, 9, 200])),
    }[how]
