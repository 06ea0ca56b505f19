"""Tensors in files, which are mapped into memory and read where they are used."""

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxddp.parity.lazy_arrays import Arrays

_FILES = "files.json"  # name of a tensor -> name of its file


class StoredTensors(Mapping[str, np.ndarray]):
    """Tensors in a folder, each mapped from its file when it is asked for; pickled as the folder's path.

    Writing to an array does not change its file.

    Args:
        folder: a folder made by `write_tensors`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tensors(Path(folder) / "weights", {"fc.weight": np.ones(2)})
    ...     dict(StoredTensors(Path(folder) / "weights"))
    {'fc.weight': array([1., 1.])}
    """

    def __init__(self, folder: Path):
        self._folder = folder

    @cached_property
    def _files(self) -> dict[str, str]:
        files: dict[str, str] = json.loads((self._folder / _FILES).read_text("utf-8"))
        return files

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredTensors, (self._folder,)

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(np.load(self._folder / self._files[name], mmap_mode="c"))

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def write_tensors(folder: Path, tensors: Arrays) -> None:
    """Write tensors one after another into a new folder, which `StoredTensors` maps."""
    folder.mkdir(parents=True)
    files = {name: f"{number}.npy" for number, name in enumerate(tensors)}
    for name, file in files.items():
        np.save(folder / file, tensors[name], allow_pickle=False)
    (folder / _FILES).write_text(json.dumps(files), "utf-8")
