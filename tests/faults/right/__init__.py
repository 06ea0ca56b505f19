"""A hundred correct ports whose halves are written differently."""

from .beside import planted_lines, ports_with_fault, with_fault
from .choice import RightPort, right_ports

__all__ = ["RightPort", "planted_lines", "ports_with_fault", "right_ports", "with_fault"]
