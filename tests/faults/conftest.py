"""Processes of as many replicas as the planted ports have at most."""

from collections.abc import Iterator

import pytest

from jaxddp.parity.workers import Workers
from tests.faults.planted import PLANTED


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Processes that stay up from test to test."""
    size = max(scenario.world_size for planted in PLANTED.values() for scenario in planted.scenarios)
    with Workers(size, "cpu") as workers:
        yield workers
