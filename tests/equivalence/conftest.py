"""Trajectories of both frameworks, each run once, and the table of what they proved."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

from jaxddp.config.choices import OPTIMIZERS
from jaxddp.parity.cases import Case
from jaxddp.parity.question import Trajectory
from jaxddp.parity.torch_side.pool import TorchPool
from jaxddp.parity.workers import Workers
from tests.support import cases
from tests.support.trajectories import run_jax


@pytest.fixture
def pool(workers: Workers) -> TorchPool:
    return workers.torch


@pytest.fixture(scope="session")
def run_both(workers: Workers) -> Iterator[Callable[[Case], tuple[Trajectory, Trajectory]]]:
    """Run a case in jaxddp and in torch, once however often it is asked for."""

    with ThreadPoolExecutor(1) as beside:  # torch's ranks work while jax compiles

        @cache
        def run(case: Case) -> tuple[Trajectory, Trajectory]:
            weights = case.initial_weights()
            torch_run = beside.submit(workers.torch.run, case, weights)
            return run_jax(case, weights), torch_run.result()

        yield run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of what was proven."""
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
