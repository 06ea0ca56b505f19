"""Draws under other seeds: which generators they reach, and when the port is made anew."""

import random
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # which wraps torch.manual_seed

from jaxddp.parity.initial_draws import DRAWS, FEW, LARGEST, Seeds, drawn, draws_for

HELD = types.ModuleType("a_module_that_holds_functions")
HELD.default_rng, HELD.manual_seed = np.random.default_rng, torch.manual_seed  # type: ignore[attr-defined]


def seeded(seed: Callable[..., Any], draw: Callable[[], float]) -> Callable[[int], float]:
    """Return a function that sets the seed of a global generator and draws."""

    def of(number: int) -> float:
        seed(number)
        return draw()

    return of


def held(number: int) -> float:
    """Draw by a generator whose function another module has imported by its name."""
    return float(sys.modules[HELD.__name__].default_rng(number).random())


WAYS: dict[str, Callable[[int], float]] = {
    "np.random.seed": lambda n: seeded(np.random.seed, np.random.random)(n),
    "RandomState": lambda n: np.random.RandomState(n).random_sample(),
    "RandomState(seed=)": lambda n: np.random.RandomState(seed=n).random_sample(),
    "default_rng": lambda n: np.random.default_rng(n).random(),
    "default_rng of a tuple": lambda n: np.random.default_rng((n, 7)).random(),
    "random.seed": lambda n: seeded(random.seed, random.random)(n),
    "torch.manual_seed": lambda n: seeded(torch.manual_seed, lambda: float(torch.rand(())))(n),
    "torch.random.manual_seed": lambda n: seeded(torch.random.manual_seed, lambda: float(torch.rand(())))(n),
    "a held function": held,
}


@pytest.mark.parametrize("way", WAYS)
def test_equal_seeds_stay_equal_and_all_others_differ(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, HELD.__name__, HELD)
    draw, seeds = WAYS[way], Seeds(0)
    before = draw(5)
    with seeds.replacing():
        numbers = []
        for number in range(3):
            seeds.begin(number)
            numbers += [draw(5), draw(6)]
            assert draw(5) == numbers[-2]
    assert numbers[0] == draw(5) == before
    assert len({*numbers}) == 6


def test_generators_without_a_seed_of_their_own_are_seeded_and_left_as_they_were() -> None:
    def draw() -> tuple[float, ...]:
        numbers = (np.random.random(), random.random(), float(torch.rand(())), np.random.default_rng().random())  # noqa: NPY002
        return (*numbers, np.random.RandomState().random_sample())

    def under(seeds: Seeds) -> list[tuple[float, ...]]:
        with seeds.replacing():
            return [(seeds.begin(number), draw())[1] for number in range(2)]  # type: ignore[func-returns-value]

    torch.manual_seed(3)
    states = torch.get_rng_state(), random.getstate()
    first = under(Seeds(0))
    assert first == under(Seeds(0)) != under(Seeds(1))
    assert all(a != b for a, b in zip(*first, strict=True))
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]


def test_an_instance_of_a_generator_is_still_one() -> None:
    state = np.random.RandomState(0)
    with (seeds := Seeds()).replacing():
        seeds.begin(1)
        assert isinstance(np.random.RandomState(0), np.random.RandomState)
        assert not isinstance(None, np.random.RandomState) and state.random_sample() < 1


class Source:
    """A source whose port holds a tensor that it draws as it is made, and another that is drawn by its function."""

    name = "made"

    def __init__(self, holds: bool) -> None:
        self.holds, self.made = holds, 0

    def port(self) -> Any:
        """Make the port."""
        self.made += 1
        at_load = np.random.default_rng(0).random(4) if self.holds else np.zeros(4)
        return lambda: {"held": at_load, "drawn": np.random.default_rng(0).random(4), "steps": np.zeros(1, int)}


@pytest.mark.parametrize(("holds", "made"), [(False, 2), (True, 2 + 1 + DRAWS - 3)])
def test_a_port_is_made_anew_only_as_often_as_it_must(holds: bool, made: int) -> None:
    source = Source(holds)
    with (seeds := Seeds()).replacing():
        tensors = drawn(source, lambda port: port(), seeds, DRAWS)  # type: ignore[arg-type, operator]
    assert source.made == made and [*tensors] == ["held", "drawn"]
    assert len(np.unique(tensors["drawn"].values)) == 4 * DRAWS
    assert len(np.unique(tensors["held"].values)) == (4 * DRAWS if holds else 1)


def test_a_large_model_is_drawn_less_often_and_its_tensors_are_excerpts() -> None:
    assert [draws_for(elements) for elements in (10, 2**22, 2**22 + 1)] == [DRAWS, DRAWS, FEW]

    class Wide(Source):
        def port(self) -> Any:
            return lambda: {"wide": np.random.default_rng(0).random((5_000, 64)), "small": np.zeros(LARGEST)}

    with (seeds := Seeds()).replacing():
        tensors = drawn(Wide(False), lambda port: port(), seeds, 3)  # type: ignore[arg-type, operator]
    assert tensors["small"].values.shape == (3, LARGEST)
    # An excerpt has an element of each row, such as an embedding's padding.
    assert 5_000 <= tensors["wide"].values.shape[1] <= LARGEST
