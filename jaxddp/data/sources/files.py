"""Files of examples that are read as they are needed: tokens, arrays, folders of images, and Parquet."""

import os
import struct
import weakref
import zipfile
from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxddp.data.sources.digests import array_digest, places
from jaxddp.errors import InputError, reason
from jaxddp.files import check_regular

IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # as torchvision's ImageFolder
ROW_GROUPS = 4  # of a Parquet file, which are kept decoded


class TokenFile:
    """Windows of a file of tokens; see `token_file`."""

    def __init__(self, path: str | Path, length: int, stride: int | None = None, dtype: str = "uint16"):
        self.path, self.length, self.stride, self.dtype = Path(path), length, stride or length, np.dtype(dtype)
        if length < 1 or self.stride < 1:
            raise InputError(f"token_file({path}): length {length}, stride {self.stride}: must be at least 1")
        check_regular(f"token_file({path})", self.path)
        if not self.path.is_file():
            raise InputError(f"token_file({path}): no such file")
        self._bytes = self.path.stat().st_size
        tokens, rest = divmod(self._bytes, self.dtype.itemsize)
        if rest:
            raise InputError(f"token_file({path}): has {self._bytes} bytes, which are no {self.dtype} numbers")
        if tokens <= length:
            raise InputError(f"token_file({path}): has {tokens} tokens; a window of {length} needs {length + 1}")
        self._size = (tokens - 1 - length) // self.stride + 1

    def __reduce__(self) -> Any:
        return TokenFile, (self.path, self.length, self.stride, self.dtype.name)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        if not -self._size <= index < self._size:
            raise IndexError(index)
        return {name: array[0] for name, array in self.gather(np.array([index % self._size])).items()}

    def gather(self, indices: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return the windows of indices (...) as x and y, int32 (..., length)."""
        windows = np.empty((indices.size, self.length + 1), self.dtype)
        # Not mapped: a file that is cut short meanwhile would end the process, and what was read counts as its memory.
        for window, index in zip(windows, indices.reshape(-1).tolist(), strict=True):
            if os.preadv(self._file, [window], index * self.stride * self.dtype.itemsize) != window.nbytes:
                raise InputError(f"token_file({self.path}): window {index} cannot be read; the file has become shorter")
        tokens = windows.reshape(*indices.shape, -1).astype(np.int32)
        return {"x": tokens[..., :-1], "y": tokens[..., 1:]}

    def digest(self, verify: bool) -> str:
        """Return the digest of the file or, without `verify`, of its size and some windows."""
        size = np.array([self._bytes, self.length, self.stride])
        if verify:
            return array_digest({"sizes": size, "tokens": np.memmap(self.path, self.dtype, "r")})
        return array_digest({"sizes": size, **self.gather(places(len(self)))})

    @cached_property
    def _file(self) -> int:
        descriptor = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor)
        return descriptor


def token_file(path: str | Path, length: int, stride: int | None = None, dtype: str = "uint16") -> TokenFile:
    """Return windows of a file of tokens (`.bin`, as nanoGPT writes them), which are read as they are needed.

    Args:
        path: file of numbers of type `dtype`, nothing else.
        length: tokens of a window.
        stride: tokens between the starts of two windows; None: `length`, so that windows do not overlap.
        dtype: type of a token.

    Returns:
        Examples {"x", "y"} int32 (length,), where y is x one token later.

    Raises:
        InputError: the file is missing, or too short for a window.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     np.arange(10, dtype=np.uint16).tofile(file.name)
    ...     windows = token_file(file.name, length=4, stride=3)
    ...     len(windows), windows[1]
    (2, {'x': array([3, 4, 5, 6], dtype=int32), 'y': array([4, 5, 6, 7], dtype=int32)})
    """
    return TokenFile(path, length, stride, dtype)


def array_file(path: str | Path) -> Any:
    """Return the array of a `.npy` file, or the arrays of a `.npz` file by name, mapped from disk.

    Arrays of a `.npz` file that `numpy.savez_compressed` wrote are read into memory.

    Raises:
        InputError: the file is missing, or is no such file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(Path(folder, "data.npz"), x=np.ones((3, 2)), y=np.arange(3))
    ...     arrays = array_file(Path(folder, "data.npz"))
    >>> type(arrays["x"]).__name__, arrays["y"]
    ('memmap', memmap([0, 1, 2]))
    """
    path = Path(path)
    check_regular(f"array_file({path})", path)
    try:
        if path.suffix != ".npz":
            return np.load(path, mmap_mode="r", allow_pickle=False)
        with np.load(path, allow_pickle=False) as archive, path.open("rb") as file:
            members = {member.filename: member for member in archive.zip.infolist()}
            return {
                name: _mapped(path, file, member) if member.compress_type == zipfile.ZIP_STORED else archive[name]
                for name, member in ((name, members[f"{name}.npy"]) for name in archive.files)
            }
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        says = getattr(error, "strerror", None) or reason(error)
        raise InputError(f"array_file({path}): {says}; must be a .npy or .npz file of numbers") from None


def _mapped(path: Path, file: Any, member: zipfile.ZipInfo) -> NDArray[Any]:
    """Map an array that a zip file holds as it is."""
    file.seek(member.header_offset + 26)
    name_length, extra_length = struct.unpack("<HH", file.read(4))
    file.seek(name_length + extra_length, os.SEEK_CUR)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("holds objects")
    return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")


class ImageFolder:
    """Images in a folder for each class; see `image_folder`."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        where = f"image_folder({path})"
        if not self.path.is_dir():
            raise InputError(f"{where}: no such folder")
        self.classes = sorted(entry.name for entry in self.path.iterdir() if entry.is_dir())
        self._files, self._labels = [], []
        for label, name in enumerate(self.classes):
            of_class = [
                os.path.join(folder, file)  # noqa: PTH118 - a Path takes ten times as long and as much memory
                for folder, _, files in sorted(os.walk(self.path / name, followlinks=True))
                for file in sorted(files)
                if file.lower().endswith(IMAGES)
            ]
            if not of_class:
                raise InputError(f"{where}: {name}: has no images ({', '.join(IMAGES)})")
            self._files += of_class
            self._labels += [label] * len(of_class)
        if not self._files:
            raise InputError(f"{where}: has no folders of images, one for each class")

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        from PIL import Image

        with Image.open(self._files[index]) as image:
            return {"x": np.asarray(image.convert("RGB")), "y": self._labels[index]}


def image_folder(path: str | Path) -> ImageFolder:
    """Return the images of a folder with a subfolder for each class, in the order of torchvision's ImageFolder.

    Returns:
        Examples {"x": uint8 (height, width, 3), "y": number of the class}, and `classes`, the names of the subfolders.

    Raises:
        InputError: the folder is missing, or a class has no images.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("cat", "dog"):
    ...         Path(folder, name).mkdir()
    ...         Image.new("RGB", (4, 3)).save(Path(folder, name, "1.png"))
    ...     images = image_folder(folder)
    ...     len(images), images.classes, images[1]["x"].shape, images[1]["y"]
    (2, ['cat', 'dog'], (3, 4, 3), 1)
    """
    return ImageFolder(path)


class Parquet:
    """Rows of Parquet files; see `parquet`."""

    def __init__(self, path: str | Path):
        from pyarrow import ArrowException
        from pyarrow.parquet import read_metadata

        self.path = Path(path)
        where = f"parquet({path})"
        files = sorted(self.path.rglob("*.parquet")) if self.path.is_dir() else [self.path]
        if not files:
            raise InputError(f"{where}: has no files *.parquet")
        self._groups: list[tuple[Path, int]] = []
        sizes = []
        for file in files:
            try:
                metadata = read_metadata(file)
            except (OSError, ArrowException) as error:
                raise InputError(f"{where}: {file}: {reason(error)}") from None
            self._groups += [(file, group) for group in range(metadata.num_row_groups)]
            sizes += [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._ends = np.cumsum(sizes)
        self._decoded: OrderedDict[int, dict[str, NDArray[Any]]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_decoded": OrderedDict()}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        group = int(np.searchsorted(self._ends, index, side="right"))
        columns = self._columns(group)
        return {name: column[index - self._ends[group]] for name, column in columns.items()}

    def _columns(self, group: int) -> dict[str, NDArray[Any]]:
        """Decode a row group, or return it from among the last few."""
        if group not in self._decoded:
            from pyarrow.parquet import ParquetFile

            path, number = self._groups[group]
            with ParquetFile(path) as file:
                table = file.read_row_group(number)
            names = zip(table.column_names, table.columns, strict=True)
            self._decoded[group] = {name: column.to_numpy() for name, column in names}
        self._decoded.move_to_end(group)
        while len(self._decoded) > ROW_GROUPS:
            self._decoded.popitem(last=False)
        return self._decoded[group]


def parquet(path: str | Path) -> Parquet:
    """Return the rows of a Parquet file, or of all `*.parquet` below a folder, as dictionaries of their columns.

    Text columns stay out of batches. A row is decoded together with its row group, so that shuffled rows are read
    quickly from small row groups only (`row_group_size=1000` in pyarrow).

    Raises:
        InputError: there is no such file.
        ModuleNotFoundError: pyarrow is not installed.

    >>> import tempfile, pyarrow, pyarrow.parquet
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     table = pyarrow.table({"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 1]})
    ...     pyarrow.parquet.write_table(table, f"{folder}/data.parquet")
    ...     rows = parquet(folder)
    ...     len(rows), rows[1]
    (2, {'x': array([3., 4.]), 'y': np.int64(1)})
    """
    return Parquet(path)
