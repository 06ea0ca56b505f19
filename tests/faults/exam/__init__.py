"""Exam of the parity check: correct ports, one half of which is edited mechanically, as mutation testing does.

Whatever means something else must not be called equal in silence. Nothing in this folder imports the check.

operators     values, calls and names: pieces of a file, and what may stand there by mistake; siblings: the tables
ports         the correct ports, and which statements one half alone uses
selection     the 700 mutants, and shares of them
equivalence   proofs that a mutant is the same program; equivalents: those by hand
silent.txt    the mutants that the check says nothing of today
"""

from pathlib import Path

from .ports import HALVES, PORTS, STEPS, WORLD_SIZE, ExamPort
from .selection import COUNTS, Mutant, chosen, digest, further_mutants, share_of_exam

SILENT = Path(__file__).parent / "silent.txt"

__all__ = [
    "COUNTS",
    "HALVES",
    "PORTS",
    "SILENT",
    "STEPS",
    "WORLD_SIZE",
    "ExamPort",
    "Mutant",
    "chosen",
    "digest",
    "further_mutants",
    "share_of_exam",
]
