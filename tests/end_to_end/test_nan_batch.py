"""A loss that is NaN is told with the examples of its batch and the one whose loss it is, alike by both trainers."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxddp.config import TrainConfig
from jaxddp.errors import TrainingError
from jaxddp.parity.processes import Tell
from jaxddp.parity.workers import Workers
from jaxddp.program import default_config, load_program
from jaxddp.train import main
from tests.support.run_files import FLAGS, OF_EACH, SQUARE, in_jax, in_torch, write
from torch_ref.config import TorchConfig, TorchTrainerConfig
from torch_ref.distributed import World
from torch_ref.train import train

WITH_IDS = ("return data(75, 0)", 'return {**data(75, 0), "id": np.arange(75)}')
TEST_IDS = ("return data(21, 1)", 'return {**data(21, 1), "id": np.arange(21)}')


def root(*examples: int, end: str = "") -> tuple[str, str]:
    """Return the change to a loss whose values for some examples, by their targets, are roots of negative numbers."""
    wrong = " | ".join(f"(batch['id'] == {example})" for example in examples)
    return SQUARE, f"    losses = {OF_EACH}\n    return ((losses + 1 - 1e9 * ({wrong})) ** 0.5){end}\n"


@dataclass(frozen=True)
class Training:
    """Job for torch's ranks: a run that fails. Its result is the message."""

    config: TorchTrainerConfig | Path
    flags: dict[str, Any]
    source: ClassVar[Any] = SimpleNamespace(name="torch_ref.train")
    world_size: ClassVar[int] = 2

    def run(self, world: World, tell: Tell) -> str:
        config = self.config
        if isinstance(config, Path):
            config = default_config(load_program(config), TorchTrainerConfig)
        try:
            train(world, dataclasses.replace(config, **self.flags))
        except TrainingError as error:
            return str(error)
        return "no error"


def about_examples(message: str) -> list[str]:
    """Return the parts of a message that name examples of the batch."""
    return [part for part in message.split("; ") if "the loss of " in part or "its batch " in part]


@pytest.mark.parametrize("flags", [{}, {"shuffle": False}, {"join": True, "global_batch_size": 18}], ids=str)
def test_the_batch_of_a_loss_that_is_nan_is_named(flags: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, root(41), WITH_IDS, TEST_IDS)
    messages = []
    for side in (in_jax, in_torch):
        with pytest.raises(TrainingError) as caught:
            side(path, tmp_path / f"{side.__name__}", **flags)
        messages.append(str(caught.value))
        assert "loss is nan at step " in messages[-1] and "; --detect-anomaly names " in messages[-1]
    batches = [message.partition("its batch has the examples ")[2].partition(";")[0] for message in messages]
    assert batches[0] == batches[1] and "41" in batches[0].replace(" and 2 more", "").split(", ")
    if not flags.get("shuffle", True):
        assert batches[0] == ", ".join(map(str, range(32, 48)))


@pytest.mark.parametrize(
    ("change", "flags", "culprit"),
    [
        (root(41), {}, ["the loss of example 41 is not finite"]),
        (
            root(74),
            {"accumulation_steps": 4, "remat": True, "shuffle": "index"},
            ["the loss of example 74 is not finite"],
        ),
        # Of the batch 32 to 47, rank 1 has 35 in its first micro-batch and 43 in its third, and rank 0 has 46.
        (
            root(46, 43, 35),
            {"accumulation_steps": 4, "shuffle": False, "loss_normalization": "global"},
            ["the loss of example 35 (and of 2 more) is not finite"],
        ),
        (root(41, end=".mean()"), {}, []),
        (root(41, end="[:, None]"), {}, ["the loss of example 41 is not finite"]),
    ],
    ids=["shuffled", "accumulated", "several", "mean", "elements"],
)
def test_the_example_whose_own_loss_is_nan_is_named(
    change: tuple[str, str], flags: dict[str, Any], culprit: list[str], tmp_path: Path, workers: Workers
) -> None:
    path = write(tmp_path, change, WITH_IDS, TEST_IDS)
    flags = {"detect_anomaly": True, **flags}
    with pytest.raises(TrainingError) as caught:
        in_jax(path, tmp_path / "jax", **flags)
    torchs = about_examples(workers.torch.do(Training(path, FLAGS | flags))[0])
    assert about_examples(str(caught.value)) == torchs == [*culprit, torchs[-1]]
    assert torchs[-1].startswith("its batch has the examples ")


def test_the_example_whose_cross_entropy_is_nan_is_named(tmp_path: Path, workers: Workers) -> None:
    x, y = np.random.default_rng(0).standard_normal((48, 5)).astype(np.float32), np.arange(48) % 3
    x[29] = 3e38  # the sum of which overflows
    data, weights = str(tmp_path / "data.npz"), str(tmp_path / "ones.safetensors")
    np.savez(data, x_train=x, y_train=y, x_test=x[:9], y_test=y[:9])
    save_file({"fc.weight": np.ones((3, 5), np.float32), "fc.bias": np.zeros(3, np.float32)}, weights)
    options = FLAGS | {"dataset": "npz", "data_path": data, "weights": weights, "model": "linear", "dtype": "float32"}
    options |= {"global_batch_size": 12, "detect_anomaly": True}
    with pytest.raises(TrainingError) as caught:
        main(TrainConfig(**options))
    torchs = about_examples(workers.torch.do(Training(TorchConfig(**options), {}))[0])
    assert about_examples(str(caught.value)) == torchs == ["the loss of example 29 is not finite", torchs[-1]]
