"""Compiles the flax twins in a hurry: what is compared here is what they mean."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def soon_compiled() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
