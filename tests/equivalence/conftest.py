"""Fixtures that run a case once in each framework, and the table printed after `make test`."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from unittest import mock

import numpy as np
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
def run_both(
    workers: Workers, request: pytest.FixtureRequest
) -> Iterator[Callable[[Case], tuple[Trajectory, Trajectory]]]:
    """Return a function that runs a case in jaxddp and in torch, each case once; with --shard-map, both ways."""

    with ThreadPoolExecutor(1) as beside:  # torch's ranks work while jax compiles

        @cache
        def run(case: Case) -> tuple[Trajectory, Trajectory]:
            weights = case.initial_weights()
            torch_run = beside.submit(workers.torch.run, case, weights)
            jax_run = run_jax(case, weights)
            if request.config.getoption("--shard-map"):
                with mock.patch.dict(os.environ, JAXDDP_MAPPED_BY="pmap"):
                    assert_same_bits(jax_run, run_jax(case, weights))
            return jax_run, torch_run.result()

        yield run


def assert_same_bits(one: Trajectory, other: Trajectory) -> None:
    """Raise unless all tensors of all stages and steps are the same, bit for bit."""
    for step, (record, expected) in enumerate(zip(one.records, other.records, strict=True), 1):
        assert record.keys() == expected.keys()
        for stage in record:
            assert record[stage].keys() == expected[stage].keys()
            for name, array in record[stage].items():
                same = np.asarray(array).tobytes() == np.asarray(expected[stage][name]).tobytes()
                assert same, f"step {step}, {stage}: {name}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the largest difference between jaxddp and torch DDP, by model and optimizer."""
    if not cases.WORST:
        return
    terminalreporter.section("jaxddp against PyTorch DDP")
    for line in cases.summary(BASIC_OPTIMIZERS):
        terminalreporter.line(line)
