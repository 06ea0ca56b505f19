"""Parity check: identical steps in jaxddp and in torch, compared stage by stage, with differences explained.

Only this package imports both frameworks; each side runs in child processes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxddp.parity.checking import check
    from jaxddp.parity.port import Port, flattened, fused, part, summed, transposed
    from jaxddp.parity.recorder.recorder import Recorder
    from jaxddp.parity.recordings.compare import compare_runs
    from jaxddp.parity.report.report import Report

__all__ = ["Port", "Recorder", "Report", "check", "compare_runs", "flattened", "fused", "part", "summed", "transposed"]

_RULES = ("flattened", "fused", "part", "summed", "transposed")  # of a port's `names`
_HOMES = {
    **{"check": "checking", "Report": "report.report", "Port": "port", **dict.fromkeys(_RULES, "port")},
    **{"Recorder": "recorder.recorder", "compare_runs": "recordings.compare"},
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that a torch rank, whose code is in this package too, needs no jax."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
