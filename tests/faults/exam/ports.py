"""List the correct ports to edit: nine of `tests.faults.outside`, two programs and two of other styles."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from tests.faults.outside import PORTS as PORTS_OUTSIDE
from tests.faults.outside.fault import FIELDS, port_texts

from .source import Source

ROOT = Path(__file__).parents[3]
STEPS = 3  # of each check; a schedule that differs later only shows beyond the run
WORLD_SIZE = 2
HALVES = ("jax", "torch")
# Names of a program that both halves use; what they reach is not edited, nor are the tables of names.
SHARED = frozenset(
    {"batch", "train_data", "test_data", "augment", "Options", "names", "no_twin", "steps_per_epoch", "clip_grad_norm"}
    | {"accumulation_steps", "epochs", "global_batch_size", "optimizer", "lr", "predict", "metrics"}
)
FILES = {
    "mine": ("examples/mine.py",),
    "run_vae": ("examples/vae.py",),
    "residual_convnet": ("examples/ports/residual_convnet.py",),
    "critics": tuple(f"tests/faults/threads/programs/critics/{name}.py" for name in ("port", "jax_half", "torch_half")),
}


@dataclass(frozen=True)
class ExamPort:
    """A correct port, as text.

    Attributes:
        name: name of the port.
        texts: file -> its text.
        port: name of the program.
        halves: "jax" and "torch" -> name of the file that has this half.
    """

    name: str
    texts: Mapping[str, str]
    port: str
    halves: Mapping[str, str]

    @cached_property
    def sources(self) -> Mapping[str, Source]:
        """Return the source of each half's file."""
        return {half: Source(self.texts[file]) for half, file in self.halves.items()}

    def statements(self, half: str) -> set[ast.stmt]:
        """Return the statements that a half reaches, without those that the other half or both use."""
        fields = {side: {*FIELDS[side]} - SHARED for side in HALVES}
        source, own = self.sources[half], fields.pop(half)
        return source.reached(own) - source.reached(SHARED.union(*fields.values()))

    def write(self, folder: Path, half: str = "jax", text: str | None = None) -> Path:
        """Write the port into an empty folder, perhaps with another text for a half; return the program."""
        for name, own in self.texts.items():
            (folder / name).write_text(text if text is not None and name == self.halves[half] else own)
        return folder / self.port


def _port(name: str, texts: Mapping[str, str], port: str) -> ExamPort:
    """Return a port of files, of which those of a half have its name as a word of theirs; or of one file."""
    halves = {half: next((file for file in texts if half in re.split(r"[_.]", file)), port) for half in HALVES}
    return ExamPort(name, MappingProxyType(dict(texts)), port, halves)


def _of_files(name: str, files: tuple[str, ...]) -> ExamPort:
    return _port(name, {Path(file).name: (ROOT / file).read_text() for file in files}, Path(files[0]).name)


PORTS: Mapping[str, ExamPort] = {
    **{name: _port(name, port_texts(name, ()), "port.py") for name in PORTS_OUTSIDE},
    **{name: _of_files(name, files) for name, files in FILES.items()},
}
