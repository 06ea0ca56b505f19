"""Checkpoints in a folder of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxddp.checkpoint import Checkpoints
from tests.support.checkpoint_states import RUN


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / RUN / "checkpoints"


@pytest.fixture
def checkpoints(folder: Path) -> Iterator[Checkpoints]:
    opened = Checkpoints(folder)
    yield opened
    opened.close()
