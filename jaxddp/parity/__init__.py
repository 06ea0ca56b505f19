"""The parity check: identical steps in jaxddp and in torch, compared stage by stage, differences explained.

The one place that knows both frameworks. Both sides run in child processes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxddp.parity.checking import check
    from jaxddp.parity.port import Port
    from jaxddp.parity.report.report import Report

__all__ = ["Port", "Report", "check"]

_HOMES = {"check": "checking", "Report": "report.report", "Port": "port"}


def __getattr__(name: str) -> Any:
    """Load what is asked for: a rank of torch, which lives in this package too, needs no jax."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
