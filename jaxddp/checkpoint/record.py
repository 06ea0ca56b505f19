"""Record of a checkpoint: digests of its arrays, which reveal damage when it is read, and notes of its writer.

The file of a record is one JSON object:

    {"format": 1, "arrays": {NAME: {"shape": ..., "dtype": ..., "sha256": ...}}, "notes": ..., "sha256": ...}

where the last "sha256" is the digest of all the rest, in every format that will ever be.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

from jaxddp.checkpoint.handlers import Errors, noted
from jaxddp.errors import InputError

FORMAT = 1
FILE = "record.json"

Arrays = Mapping[str, np.ndarray]
Notes = Mapping[str, Any]  # JSON


class DamagedError(Exception):
    """A checkpoint that does not hold what was saved; the message says where."""


@dataclass(frozen=True)
class Record:
    """Record of a checkpoint.

    Attributes:
        arrays: name -> "shape", "dtype" and "sha256" of an array's bytes.
        notes: what the writer noted.
    """

    arrays: dict[str, dict[str, Any]]
    notes: dict[str, Any]

    @classmethod
    def of(cls, arrays: Arrays, notes: Notes) -> "Record":
        """Return the record of arrays by name.

        >>> record = Record.of({"w": np.zeros(2, np.float32)}, {"test_loss": 0.5})
        >>> record.damaged({"w": np.zeros(2, np.float32)}), record.damaged({"w": np.float32([0, 1e-45])})
        ([], ['w'])
        """
        described = {
            name: {"shape": list(array.shape), "dtype": str(array.dtype), "sha256": _digest(array)}
            for name, array in arrays.items()
        }
        return cls(described, dict(notes))

    @classmethod
    def read(cls, file: Path) -> "Record":
        """Read a record.

        Raises:
            DamagedError: the file is missing or is not as it was written.
            InputError: a newer jaxddp has written it.
        """
        try:
            content = json.loads(file.read_bytes())
            if content.pop("sha256") != _digest_of_content(content):
                raise DamagedError(file.name)
        except FileNotFoundError:
            raise DamagedError(f"{file.name} is missing") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise DamagedError(file.name) from None
        if content["format"] > FORMAT:
            raise InputError(f"has format {content['format']}, and this jaxddp reads up to {FORMAT}; update jaxddp")
        return cls(content["arrays"], content["notes"])

    def write(self, file: Path) -> None:
        """Write the record to a file."""
        content = {"format": FORMAT, "arrays": self.arrays, "notes": self.notes}
        file.write_text(json.dumps({**content, "sha256": _digest_of_content(content)}))

    def damaged(self, arrays: Arrays) -> list[str]:
        """Return the names of the arrays that are not as they were saved."""
        return [name for name, about in self.arrays.items() if _digest(arrays[name]) != about["sha256"]]


@dataclass
class RecordSave(ocp.args.CheckpointArgs):
    """Arrays and notes to save a record of; the arrays must not change until the save has ended."""

    arrays: Arrays
    notes: Notes


class RecordHandler(ocp.AsyncCheckpointHandler):
    """Orbax handler that writes a `Record` next to the arrays, in the same atomic checkpoint.

    Digests take a second for about 1 GB, so they are computed in Orbax's thread.

    Args:
        errors: list to which the errors of writes are added.
    """

    def __init__(self, errors: Errors):
        self._errors = errors

    async def async_save(self, directory: Any, args: RecordSave) -> list[Any]:
        """Start to write; see Orbax."""
        return [CommitFutureAwaitingContractedSignals(self._write(Path(directory), args), name="record")]

    async def _write(self, directory: Path, args: RecordSave) -> None:
        with noted(self._errors):
            self.save(directory, args)

    def save(self, directory: Any, args: RecordSave) -> None:
        """Write at once; see Orbax."""
        if jax.process_index() == 0:
            Record.of(args.arrays, args.notes).write(Path(directory) / FILE)

    def restore(self, directory: Any, args: Any = None) -> Record:
        """Read; see Orbax."""
        return Record.read(Path(directory) / FILE)


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def _digest_of_content(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


ocp.args.register_with_handler(RecordHandler, for_save=True, for_restore=True)(RecordSave)
