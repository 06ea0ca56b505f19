"""Provide what several tests of the diagnosis use."""

from collections.abc import Iterator

import jax
import pytest
import torch


@pytest.fixture
def in_float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
