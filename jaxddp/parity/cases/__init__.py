"""Cases that can be checked: `Case`, one of jaxddp's own models, and `PortCase`, a user's port."""

from jaxddp.parity.cases.builtin import NamedCase, builtin_cases, make_case
from jaxddp.parity.cases.case import Case
from jaxddp.parity.cases.port_case import PortCase

__all__ = ["Case", "NamedCase", "PortCase", "builtin_cases", "make_case"]
