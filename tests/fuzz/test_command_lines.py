"""Random command lines and configs of resumed runs: each is taken, or refused in one line; nothing else happens."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from jaxddp import cli
from jaxddp.config import TrainConfig
from jaxddp.data import datasets
from jaxddp.data.model_sizes import model_sizes
from tests.fuzz.command_lines import config_file, flags
from tests.fuzz.outcomes import LITTLE, check_outcome
from torch_ref.config import TorchConfig

FEW, MANY = 100, 5_000  # of each kind


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use little memory, read the digits once, and no help from the source, which takes tyro half of its time."""
    monkeypatch.setattr("jaxddp.data.memory.memory", lambda: LITTLE)
    monkeypatch.setattr("tyro._docstrings.get_field_docstring", lambda *arguments: None)
    digits = datasets.load(TrainConfig())
    monkeypatch.setattr(datasets, "_digits", lambda config: digits)
    monkeypatch.chdir(tmp_path)


def build(argv: list[str], config_class: type[TrainConfig] = TrainConfig) -> None:
    """Do what both trainers do with a command line before they start devices and processes."""
    config = cli.parse(config_class, argv, "prog")
    config.per_replica_batch_size(config.devices or 2)
    dataset = datasets.load(config)
    model_sizes(config, dataset)
    config.total_steps(max(1, len(dataset.train["y"]) // config.global_batch_size))


def check_command_lines(count: int, seed: int) -> None:
    rng = random.Random(seed)
    taken = 0
    for _ in range(count):
        argv = flags(rng)
        taken += check_outcome(partial(build, argv, rng.choice([TrainConfig, TorchConfig])), argv)
    assert count / 20 < taken < count  # both kinds are tried
    assert list(Path().iterdir()) == []


def check_configs(count: int, seed: int) -> None:
    rng = random.Random(seed)
    taken = 0
    Path("run").mkdir()
    for _ in range(count):
        content = config_file(rng)
        Path("run", "config.json").write_bytes(content)
        taken += check_outcome(partial(build, ["--resume", "run"]), content[:500])
    assert count / 20 < taken < count
    assert [path.name for path in Path("run").iterdir()] == ["config.json"]


SEEDS = [(FEW, 0), *(pytest.param(MANY // 4, seed, marks=pytest.mark.large) for seed in range(1, 5))]


@pytest.mark.parametrize(("count", "seed"), SEEDS)
@pytest.mark.parametrize("check", [check_command_lines, check_configs])
def test_random_inputs_are_taken_or_refused_in_one_line(
    check: Callable[[int, int], None], count: int, seed: int
) -> None:
    check(count, seed)
