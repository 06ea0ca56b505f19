"""Checks of a small port, on two replicas and on one."""

from pathlib import Path

import pytest

from jaxddp.parity.workers import Workers
from tests.support.checks import Checked, checker


@pytest.fixture
def checked(tmp_path: Path, workers: Workers) -> Checked:
    return checker(tmp_path, workers, world_size=2)


@pytest.fixture
def failing(tmp_path: Path, single: Workers) -> Checked:
    return checker(tmp_path, single, world_size=1)
