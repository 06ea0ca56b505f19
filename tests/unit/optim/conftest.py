"""Fixture of the comparisons in float64."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield
