"""Checkpoints of a training state."""

from jaxddp.checkpoint.checkpoints import Checkpoints

__all__ = ["Checkpoints"]
