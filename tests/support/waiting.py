"""Wait for what other processes do."""

import time
from collections.abc import Callable, Iterable
from subprocess import Popen


def wait_for(
    condition: Callable[[], object],
    running: Iterable[Popen] = (),
    said: Callable[[], object] = lambda: "",
    limit: float = 240.0,
) -> None:
    """Wait until a condition holds; fail with `said()` after `limit` seconds, or if a process in `running` ends."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, said()
        assert all(process.poll() is None for process in running), said()
        time.sleep(0.02)
