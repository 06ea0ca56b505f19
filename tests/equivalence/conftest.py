"""One pool of torch ranks, and one memory of trajectories, for all parity tests."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from jaxddp.config.choices import OPTIMIZERS
from jaxddp.parity.cases import Case, Trajectory
from jaxddp.parity.torch_side.pool import TorchPool
from jaxddp.parity.workers import Workers
from tests.support import cases
from tests.support.checks import Checked, checker
from tests.support.trajectories import run_jax


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    with Workers(8, "cpu") as workers:
        yield workers


@pytest.fixture
def pool(workers: Workers) -> TorchPool:
    return workers.torch


@pytest.fixture(scope="session")
def run_both(workers: Workers) -> Iterator[Callable[[Case], tuple[Trajectory, Trajectory]]]:
    """A case through jaxddp and torch; asked for twice, it runs once."""

    with ThreadPoolExecutor(1) as beside:  # torch's ranks work while jax compiles

        @cache
        def run(case: Case) -> tuple[Trajectory, Trajectory]:
            weights = case.initial_weights()
            torch_run = beside.submit(workers.torch.run, case, weights)
            return run_jax(case, weights), torch_run.result()

        yield run


@pytest.fixture(scope="session")
def single() -> Iterator[Workers]:
    """One replica: its processes, which a port may end, are soon there again."""
    with Workers(1, "cpu") as workers:
        yield workers


@pytest.fixture
def checked(tmp_path: Path, workers: Workers) -> Checked:
    return checker(tmp_path, workers, world_size=2)


@pytest.fixture
def failing(tmp_path: Path, single: Workers) -> Checked:
    return checker(tmp_path, single, world_size=1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what was proven, below what was passed."""
    if not cases.WORST:
        return
    terminalreporter.section("jaxddp against torch DDP, after each of 20 steps on 1, 2, 4 and 8 replicas")
    terminalreporter.line(
        "float64: the largest difference of any loss, gradient, parameter or buffer, relative to its stage"
    )
    terminalreporter.line("(float32: distance from the float64 run, jaxddp's over torch's)")
    terminalreporter.line("")
    for line in cases.summary(OPTIMIZERS):
        terminalreporter.line(line)
