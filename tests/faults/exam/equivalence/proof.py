"""List the parts of a mutant's half that no proof shows to be those of the correct port."""

import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from ..ports import PORTS
from ..selection import Mutant
from .halves import loaded
from .jax_half import jax_program
from .torch_half import torch_program

PROGRAMS = {"jax": jax_program, "torch": torch_program}


def unproved_parts(mutant: Mutant) -> list[str]:
    """Return the parts that are not proved equal, or what prevents a proof; []: the mutant is equivalent."""
    try:
        correct = _correct(mutant.port, mutant.half)
        edited = _digests(mutant.port, mutant.half, mutant.text)
    except Exception as error:  # of the user's code, or of the trace: then nothing is proved
        return [f"{type(error).__name__}: {error}".partition("\n")[0]]
    return [part for part in {**correct, **edited} if correct.get(part) != edited.get(part)]


@cache
def _correct(port: str, half: str) -> Mapping[str, str]:
    return _digests(port, half, PORTS[port].sources[half].text)


def _digests(port: str, half: str, text: str) -> Mapping[str, str]:
    with (
        tempfile.TemporaryDirectory(prefix="jaxddp-exam-") as folder,
        loaded(PORTS[port], half, text, Path(folder)) as names,
    ):
        return PROGRAMS[half](names)
