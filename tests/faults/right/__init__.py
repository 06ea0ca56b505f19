"""A hundred correct ports whose halves are written differently."""

from .choice import RightPort, right_ports

__all__ = ["RightPort", "right_ports"]
