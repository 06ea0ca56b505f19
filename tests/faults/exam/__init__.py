"""Exam of the parity check: correct ports, one half of which is edited mechanically, as mutation testing does.

Whatever means something else must not be called equal in silence. Nothing in this folder imports the check.
"""

from pathlib import Path

from .equivalence import unproved_parts
from .equivalents import EQUIVALENTS
from .ports import HALVES, PORTS, STEPS, WORLD_SIZE, ExamPort
from .selection import COUNTS, Mutant, chosen, digest, share_of

SILENT = Path(__file__).parent / "silent.txt"
MUTANTS = tuple(mutant for half in HALVES for mutant in chosen(half))

__all__ = [
    "COUNTS",
    "EQUIVALENTS",
    "HALVES",
    "MUTANTS",
    "PORTS",
    "SILENT",
    "STEPS",
    "WORLD_SIZE",
    "ExamPort",
    "Mutant",
    "chosen",
    "digest",
    "share_of",
    "unproved_parts",
]
