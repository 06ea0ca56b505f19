"""Count of the programs that jax compiles."""

import jax

_EVENT = "/jax/core/compile/jaxpr_trace_duration"
_seen: list[str] = []


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    if event == _EVENT:
        _seen.append(event)


jax.monitoring.register_event_duration_secs_listener(_listen)


class Compilations:
    """Programs traced since this object was made.

    >>> compilations = Compilations()
    >>> jax.jit(lambda x: x + 1)(1.0) is None, compilations.count > 0
    (False, True)
    """

    def __init__(self) -> None:
        self._before = len(_seen)

    @property
    def count(self) -> int:
        """Number of programs traced so far."""
        return len(_seen) - self._before
