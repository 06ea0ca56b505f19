"""Strict jax on eight CPU devices for every test, and the choice of tests for `make test` and for CI's rotation."""

import gc
import os
import signal
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Compiled programs are kept in the virtual environment, where child processes and the next run find them.
PROGRAMS = Path(sys.prefix, "jax-programs") if sys.prefix != sys.base_prefix else Path(tempfile.mkdtemp())
os.environ |= {
    "JAX_COMPILATION_CACHE_DIR": str(PROGRAMS),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

import jax  # noqa: E402
import pytest  # noqa: E402

from benchmarks.smoke import FAST_COMPILER, compile_faster  # noqa: E402
from jaxddp.distributed.devices import prepare  # noqa: E402
from jaxddp.tracking import run_log  # noqa: E402

if TYPE_CHECKING:
    from jaxddp.parity.workers import Workers

# Rank promotion hides mistakes in shapes.
jax.config.update("jax_numpy_rank_promotion", "raise")


MOST_MAPS = 20_000
LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--eighth", type=int, choices=range(8), help="run only this eighth of the selected tests")
    parser.addoption("--shard-map", action="store_true", help="map replicas by shard_map, and compare with pmap")
    parser.addoption("--fast-compiler", action="store_true", help=f"set XLA_FLAGS={FAST_COMPILER} where jaxlib has it")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = Counter()
    if config.getoption("--fast-compiler"):
        compile_faster()
    if config.getoption("--shard-map"):
        os.environ["JAXDDP_MAPPED_BY"] = "shard_map"
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as below a script's `make test &`; children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    prepare(8, "cpu")  # starts XLA, which reads its flags once
    gc.disable()  # until all tests are imported


def pytest_collection_finish() -> None:
    """Leave out of garbage collections, one per module and more, what the imports of all tests have made."""
    gc.freeze()
    gc.enable()


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("large"):
            item.config.stash[LEFT_OUT]["/".join(Path(item.nodeid.partition("::")[0]).parts[:2])] += 1


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print how many tests are left to `make test-all`, by folder."""
    if left_out := config.stash[LEFT_OUT]:
        folders = ", ".join(f"{folder} {count}" for folder, count in sorted(left_out.items()))
        terminalreporter.line("")
        terminalreporter.line(f"{left_out.total()} large tests left to `make test-all` and CI's rotation: {folders}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as large what `one_in` and rotation.txt leave out; with `--eighth`, keep one eighth of the tests."""
    listed = {*Path(__file__).with_name("rotation.txt").read_text().split()}
    seen: Counter[tuple[Path, str]] = Counter()
    for item in items:
        if item.get_closest_marker("large"):
            continue
        for mark in item.iter_markers("one_in"):
            test = item.path, item.name.partition("[")[0]
            if (seen[test] - mark.kwargs.get("first", 0)) % mark.args[0]:
                item.add_marker(pytest.mark.large)
            seen[test] += 1
        if item.nodeid.partition("[")[0] in listed:
            item.add_marker(pytest.mark.large)
    eighth = config.getoption("--eighth")
    if eighth is not None:
        other = [item for item in items if zlib.crc32(item.nodeid.encode()) % 8 != eighth]
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if item not in set(other)]


@pytest.fixture(scope="session", autouse=True)
def no_pictures() -> Iterator[None]:
    """Draw no curves at the end of runs: drawing takes longer than most runs of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_log, "draw_curves", lambda history, title: b"")
        yield


@pytest.fixture(scope="session")
def workers() -> "Iterator[Workers]":
    """Processes of eight replicas that stay up from test to test."""
    from jaxddp.parity.workers import Workers  # imports torch, which most tests do without

    with Workers(8, "cpu") as workers:
        yield workers


@pytest.fixture(scope="session")
def single() -> "Iterator[Workers]":
    """Processes of one replica, which restart quickly after a port ends them."""
    from jaxddp.parity.workers import Workers

    with Workers(1, "cpu") as workers:
        yield workers


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs() -> Iterator[None]:
    """Free compiled programs: each maps memory, and XLA crashes beyond 65,530 maps per process."""
    yield
    jax.clear_caches()
    maps = Path("/proc/self/maps")
    # A collection takes a second: of 200 modules, that of all tests' imports and of what pytest keeps.
    if not maps.exists() or maps.read_bytes().count(b"\n") > MOST_MAPS:
        gc.collect()


@pytest.fixture
def x64() -> Iterator[None]:
    """Compute in float64."""
    with jax.enable_x64(True):
        yield
