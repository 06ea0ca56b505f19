"""Projections of a whole tensor see each element, are linear, and do not depend on the library or the layout."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp

from jaxddp.parity.projections import BLOCK, COUNT, projections, signs

SIZES = (50_000, 64)
ROUNDING = 1e-13  # of the tensor's norm, between two libraries; measured: up to 2e-14, of 30 million elements too


def size_of(whole: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(whole))))


def of_torch(x: np.ndarray) -> np.ndarray:
    tensor = torch.from_numpy(x)
    whole: Any = projections(tensor, None, torch, torch.from_numpy)
    return np.asarray(whole)


def of_jax(x: np.ndarray) -> np.ndarray:
    """Project within a program, from the transposed array, which jax holds."""
    with jax.enable_x64(True):
        transposed = jnp.asarray(np.ascontiguousarray(x.T))
        program = jax.jit(lambda y: projections(y.T, None, jnp, partial(jnp.asarray, dtype=y.dtype)))
        return np.asarray(program(transposed))


@pytest.mark.parametrize("project", [projections, of_torch, of_jax])
def test_an_element_off_by_1e_10_of_the_norm_is_seen_wherever_it_is(project: Callable[[Any], np.ndarray]) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=SIZES)
    norm, before = float(np.linalg.norm(x)), project(x)
    places = [0, x.size - 1, *rng.integers(0, x.size, 20 if project is projections else 2)]
    for place in places:
        value = x.flat[place]
        x.flat[place] += 1e-10 * norm
        apart = size_of(project(x) - before)
        x.flat[place] = value
        assert 0.99e-10 < apart / norm < 1.01e-10


@pytest.mark.parametrize("shape", [SIZES, (200_001,), (64, 3, 3, 40), (3, 200, 300)], ids=str)
def test_numpy_torch_and_a_program_of_jax_agree_up_to_rounding(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).normal(size=shape)
    whole, norm = projections(x), float(np.linalg.norm(x))
    assert whole.shape == (COUNT,)
    for other in (of_torch(x), of_jax(x), projections(np.asfortranarray(x))):
        assert np.max(np.abs(whole - other)) < ROUNDING * norm


def test_equal_and_opposite_changes_of_neighbours_do_not_cancel() -> None:
    for seed, size in itertools.product(range(4), (BLOCK, 10 * BLOCK)):
        patterns = signs(size, seed)[-BLOCK:]
        assert len(np.unique(patterns, axis=0)) == BLOCK
    x = np.zeros((300, 500))
    x[7, 33], x[7, 34] = 1.0, -1.0
    assert size_of(projections(x)) >= 0.7  # at least one of eight is 2
    swapped = np.zeros((300, 300))
    swapped[7, 33], swapped[33, 7] = 1.0, -1.0
    assert size_of(projections(swapped)) >= 0.7


def test_a_change_of_many_elements_has_their_norm_about() -> None:
    rng = np.random.default_rng(0)
    sizes = [size_of(projections(x)) / np.linalg.norm(x) for x in rng.normal(size=(50, 200, 300))]
    assert min(sizes) > 0.4 and max(sizes) < 1.8 and 0.9 < np.mean(sizes) < 1.1


def test_signs_are_balanced_and_unlike_those_of_another_axis() -> None:
    ours, others = signs(10_000, 0), signs(10_000, 1)
    assert np.max(np.abs(ours.mean(0))) < 0.05 and np.max(np.abs((ours * others).mean(0))) < 0.05
    assert np.max(np.abs(ours.T @ ours / 10_000 - np.eye(COUNT))) < 0.05
