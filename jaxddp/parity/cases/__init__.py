"""Questions that a check can ask: `Case`, about a built-in model, and `PortCase`, about a user's port."""

from jaxddp.parity.cases.builtin import Named, builtin_cases, make_case
from jaxddp.parity.cases.case import Case
from jaxddp.parity.cases.port_case import PortCase

__all__ = ["Case", "Named", "PortCase", "builtin_cases", "make_case"]
