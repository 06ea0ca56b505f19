"""Damaged and hostile data files and weights: each is read, or refused in one line; none runs code."""

import pickle
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import torch_ref.models
import torch_ref.weights
from jaxddp import models
from jaxddp.config import TrainConfig
from jaxddp.data import datasets
from jaxddp.data.torch_rng import Generator
from jaxddp.nn.functional import Functional
from jaxddp.nn.torch_weights import start_values, to_torch
from tests.fuzz import damaged_files
from tests.fuzz.damaged_files import Bomb
from tests.fuzz.outcomes import LITTLE, check_outcome

FEW, MANY = 100, 1_000  # of each kind

Read = Callable[[], object]
Draw = Callable[[random.Random, Bomb], tuple[bytes, Path, Read]]


def of_npz(rng: random.Random, bomb: Bomb) -> tuple[bytes, Path, Read]:
    config = TrainConfig(dataset="npz", data_path="data.npz")
    return damaged_files.npz(rng, bomb), Path("data.npz"), partial(datasets.load, config)


def of_names(rng: random.Random, bomb: Bomb) -> tuple[bytes, Path, Read]:
    name = rng.choice(["names.txt", "na\tmes", "\udcff.tsv", "a\nb", "-", "{}"])
    config = TrainConfig(dataset="names", model="char_mlp", data_path=name)
    return damaged_files.text(rng, bomb), Path(name), partial(datasets.load, config)


def of_weights(rng: random.Random, bomb: Bomb) -> tuple[bytes, Path, Read]:
    functional = Functional(models.CharMLP(5, 2, 3, 4, generator=Generator(0)))
    content = damaged_files.weights(rng, to_torch({**functional.params, **functional.buffers}), bomb)
    path = Path("w.safetensors")

    def by_torch() -> None:
        torch_ref.weights.load_weights(path, torch_ref.models.CharMLP(5, 2, 3, 4))

    by_jax = partial(start_values, path, functional.params, functional.buffers)
    return content, path, rng.choice([by_jax, by_torch])


def check_files(draw: Draw, count: int, seed: int) -> None:
    rng, bomb = random.Random(seed), Bomb(Path("ran"))
    taken = 0
    for _ in range(count):
        content, path, read = draw(rng, bomb)
        path.write_bytes(content)
        taken += check_outcome(read, content[:300])
        path.unlink()
    assert count / 20 < taken < count
    assert list(Path().iterdir()) == []


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("jaxddp.data.memory.memory", lambda: LITTLE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("count", "seed"), [(FEW, 0), pytest.param(MANY, 1, marks=pytest.mark.large)])
@pytest.mark.parametrize("draw", [of_npz, of_names, of_weights])
def test_damaged_files_are_read_or_refused_and_run_no_code(draw: Draw, count: int, seed: int) -> None:
    check_files(draw, count, seed)


def test_the_hostile_object_would_make_a_file() -> None:
    pickle.loads(pickle.dumps(Bomb(Path("ran"))))
    assert Path("ran").exists()
    np.save("data.npy", np.array([Bomb(Path("ran too"))], dtype=object))
    np.load("data.npy", allow_pickle=True)
    assert Path("ran too").exists()


def test_torch_loads_the_names_that_jax_gives() -> None:
    """Otherwise all weights would be refused, and the fuzzing would try little."""
    functional = Functional(models.CharMLP(5, 2, 3, 4, generator=Generator(0)))
    tensors = to_torch({**functional.params, **functional.buffers})
    torch_ref.models.CharMLP(5, 2, 3, 4).load_state_dict({name: torch.tensor(x) for name, x in tensors.items()})
