"""Makes jax strict, and gives every test the same eight CPU devices."""

import gc
import os
import tempfile
from collections.abc import Iterator

# A program that several tests compile is kept for this run, where child processes find it too.
PROGRAMS = tempfile.TemporaryDirectory()
os.environ |= {
    "JAX_COMPILATION_CACHE_DIR": PROGRAMS.name,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

import jax  # noqa: E402
import pytest  # noqa: E402

from jaxddp.distributed.devices import prepare  # noqa: E402
from jaxddp.tracking import run_log  # noqa: E402

# A tensor that meets one of another rank is a mistake here, not a convenience.
jax.config.update("jax_numpy_rank_promotion", "raise")
prepare(8, "cpu")


@pytest.fixture(scope="session", autouse=True)
def no_pictures() -> Iterator[None]:
    """Runs end without their curves, which take longer to draw than many a run takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_log, "draw_curves", lambda history, title: b"")
        yield


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs() -> Iterator[None]:
    """Each program maps memory, of which a process may have 65,530 pieces: XLA crashes beyond."""
    yield
    jax.clear_caches()
    gc.collect()
