"""Makes jax strict, and gives every test the same eight CPU devices."""

import gc
from collections.abc import Iterator

import jax
import pytest

from jaxddp.devices import prepare

# A tensor that meets one of another rank is a mistake here, not a convenience.
jax.config.update("jax_numpy_rank_promotion", "raise")
prepare(8, "cpu")


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs() -> Iterator[None]:
    """Each program maps memory, of which a process may have 65,530 pieces: XLA crashes beyond."""
    yield
    jax.clear_caches()
    gc.collect()
