"""Record of a public thread, and the port that re-enacts it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Literal, NamedTuple

PROGRAMS = Path(__file__).parent / "programs"
TORCH, JAX, PORT = "torch_half.py", "jax_half.py", "port.py"
RECORD = "record.py"  # in place of a port: writes recordings of two loops, torch_run and jax_run
Outcome = Literal["found", "mistake", "open"]
Place = Literal["cause", "types", "rates", "initialisation", "evaluation", "beyond", "remark"]


class Edit(NamedTuple):
    """Text of a program's file, which occurs there once, and the text that replaces it."""

    file: str
    old: str
    new: str

    def apply(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Return the files' texts with the edit.

        Raises:
            ValueError: the text does not occur exactly once.
        """
        if (count := texts[self.file].count(self.old)) != 1:
            raise ValueError(f"{self.file}: {count} places have {self.old!r}, must be 1")
        return {**texts, self.file: texts[self.file].replace(self.old, self.new)}


def in_torch(old: str, new: str) -> Edit:
    """Return an edit of the PyTorch half."""
    return Edit(TORCH, old, new)


def in_jax(old: str, new: str) -> Edit:
    """Return an edit of the JAX half."""
    return Edit(JAX, old, new)


def in_port(old: str, new: str) -> Edit:
    """Return an edit of the program."""
    return Edit(PORT, old, new)


WITH_JAX = in_jax("import optax\n", "import jax\nimport optax\n")
WITH_JNP = in_jax("\nLR = 1e-3\n", "from jax import numpy as jnp\n\nLR = 1e-3\n")


@dataclass(frozen=True)
class Thread:
    """A public question about two programs that train differently, and its re-enactment in own code.

    Attributes:
        addresses: issues and pull requests as owner/repository#number, the thread itself first.
        seen: what its author saw.
        found: what the thread says came of it.
        program: folder of `programs/` with a correct port, or with two loops that are recorded.
        edits: the difference, planted in one half.
        causes: for each difference the right names of the catalogue, "one|other"; () if the catalogue has no name.
        setting: edits in front of these that make the correct port the thread's; both halves still agree.
        outcome: "found", or "mistake" if the programs of the thread agree, or "open" if no cause is known there.
        note: how the re-enactment differs from the thread, or what is assumed.
        steps: number of optimizer steps.
        answer: where the check should state the cause: as that of a difference, in a row of the report, in a line on
            what differs beyond the run, or in a remark.
        words: what a sentence there must contain.
    """

    addresses: tuple[str, ...]
    seen: str
    found: str
    program: str
    edits: tuple[Edit, ...] = ()
    causes: tuple[str, ...] = ()
    setting: tuple[Edit, ...] = ()
    outcome: Outcome = "found"
    note: str = ""
    steps: int = 3
    answer: Place = "cause"
    words: tuple[str, ...] = ()

    @property
    def accepted(self) -> tuple[frozenset[str], ...]:
        """Right names, one set for each difference."""
        return tuple(frozenset(names.split("|")) for names in self.causes)

    @property
    def start(self) -> str:
        """Name of the file to start with: the port, or what records two loops."""
        return RECORD if (PROGRAMS / self.program / RECORD).exists() else PORT

    def texts(self, planted: bool = True) -> dict[str, str]:
        """Return the text of each file of the port.

        Args:
            planted: False leaves the difference out.

        Raises:
            ValueError: an edit does not match exactly once.
        """
        texts = {name: (PROGRAMS / self.program / name).read_text() for name in (TORCH, JAX, self.start)}
        return reduce(lambda so_far, edit: edit.apply(so_far), self.setting + self.edits * planted, texts)


def write_port(thread: Thread, folder: Path, planted: bool = True) -> Path:
    """Write the port of a thread into an empty or new folder, as a user has it, and return the file to start with.

    Args:
        planted: False leaves the difference out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in thread.texts(planted).items():
        (folder / name).write_text(text)
    return folder / thread.start
