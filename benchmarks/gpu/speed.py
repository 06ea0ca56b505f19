"""`python -m benchmarks` on the GPUs."""

from collections.abc import Sequence
from typing import Any

from benchmarks.__main__ import main


def measure(flags: Sequence[str]) -> dict[str, Any]:
    """Run the benchmark with some flags; return its record."""
    return main(flags)
