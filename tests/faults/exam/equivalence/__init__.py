"""Proofs that a mutant is the same program as its port; nothing here is a judgement by the numbers of a run."""

from .proof import unproved_parts

__all__ = ["unproved_parts"]
