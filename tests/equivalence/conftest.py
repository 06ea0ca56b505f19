"""Fixtures that run a case once in each framework, and the table printed after `make test`."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

from jaxddp.config.choices import BASIC_OPTIMIZERS
from jaxddp.parity.case_interface import Trajectory
from jaxddp.parity.cases import Case
from jaxddp.parity.torch_side.pool import TorchPool
from jaxddp.parity.workers import Workers
from tests.support import cases
from tests.support.trajectories import run_jax


@pytest.fixture
def pool(workers: Workers) -> TorchPool:
    return workers.torch


@pytest.fixture(scope="session")
def run_both(workers: Workers) -> Iterator[Callable[[Case], tuple[Trajectory, Trajectory]]]:
    """Return a function that runs a case in jaxddp and in torch, each case once."""

    with ThreadPoolExecutor(1) as beside:  # torch's ranks work while jax compiles

        @cache
        def run(case: Case) -> tuple[Trajectory, Trajectory]:
            weights = case.initial_weights()
            torch_run = beside.submit(workers.torch.run, case, weights)
            return run_jax(case, weights), torch_run.result()

        yield run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the largest difference between jaxddp and torch DDP, by model and optimizer."""
    if not cases.WORST:
        return
    terminalreporter.section("jaxddp against PyTorch DDP")
    for line in cases.summary(BASIC_OPTIMIZERS):
        terminalreporter.line(line)
