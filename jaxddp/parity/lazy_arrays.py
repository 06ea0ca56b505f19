"""Mappings whose arrays are read on access, so that a large model is never in memory as a whole."""

from collections.abc import Iterator, Mapping

import numpy as np

Arrays = Mapping[str, np.ndarray]


class Joined(Mapping[str, np.ndarray]):
    """View of several mappings; the first mapping that has a name gives its array.

    >>> dict(Joined({"a": np.array(1)}, {"a": np.array(2), "b": np.array(3)}))
    {'a': array(1), 'b': array(3)}
    """

    def __init__(self, *parts: Arrays):
        self._parts = parts

    def __getitem__(self, name: str) -> np.ndarray:
        for part in self._parts:
            if name in part:
                return part[name]
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return any(name in part for part in self._parts)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for part in self._parts for name in part))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Renamed(Mapping[str, np.ndarray]):
    """View of a mapping's arrays under other names.

    Args:
        arrays: the mapping.
        names: new name -> name.

    >>> dict(Renamed({"a": np.array(1)}, {"b": "a"}))
    {'b': array(1)}
    """

    def __init__(self, arrays: Arrays, names: Mapping[str, str]):
        self._arrays, self._names = arrays, names

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
