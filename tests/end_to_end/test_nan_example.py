"""The examples whose own loss is not finite are told by both trainers with --detect-anomaly."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from jaxddp.errors import TrainingError
from jaxddp.parity.processes import Tell
from jaxddp.parity.workers import Workers
from jaxddp.program import default_config, load_program
from tests.support.run_files import FLAGS, OF_EACH, SQUARE, in_jax, write
from torch_ref.config import TorchConfig, TorchTrainerConfig
from torch_ref.distributed import World
from torch_ref.train import train

WITH_IDS = ("return data(75, 0)", 'return {**data(75, 0), "id": np.arange(75)}')
TEST_IDS = ("return data(21, 1)", 'return {**data(21, 1), "id": np.arange(21)}')
DETECTED: dict[str, Any] = {"detect_anomaly": True}


def root(*examples: int) -> str:
    """Return the lines of a loss whose value for some examples is the root of a negative number."""
    wrong = " + ".join(f"(batch['id'] == {example})" for example in examples)
    return f"    losses = {OF_EACH}\n    return (losses + 1 - 1e9 * ({wrong})) ** 0.5\n"


@dataclass(frozen=True)
class Training:
    """Job for torch's ranks: a run of torch_ref.train that fails. Its result is the message."""

    path: str | None
    options: dict[str, Any]
    source: ClassVar[Any] = SimpleNamespace(name="torch_ref.train")
    world_size: ClassVar[int] = 2

    def run(self, world: World, tell: Tell) -> str:
        if self.path is None:
            config: TorchTrainerConfig = TorchConfig(**self.options)
        else:
            config = dataclasses.replace(
                default_config(load_program(Path(self.path)), TorchTrainerConfig), **self.options
            )
        try:
            train(world, config)
        except TrainingError as error:
            return str(error)
        return "nothing was raised"


def in_ranks(workers: Workers, path: Path | None, **options: Any) -> str:
    message: str = workers.torch.do(Training(None if path is None else str(path), FLAGS | options))[0]
    return message


def on_examples(message: str) -> str:
    """Return the part of a message that is about examples."""
    return next((part for part in message.split("; ") if " of example " in part), "")


@pytest.mark.parametrize(
    ("flags", "examples", "named"),
    [
        ({}, (41,), "the loss of example 41 is not finite"),
        ({"accumulation_steps": 4, "loss_normalization": "global"}, (41,), "the loss of example 41 is not finite"),
        ({"remat": True, "shuffle": "index"}, (74,), "the loss of example 74 is not finite"),
        # In the batch 32 to 47 rank 1 has 33, 35, ... and of two examples in different micro-batches the first counts.
        (
            {"shuffle": False, "accumulation_steps": 4},
            (46, 35, 43),
            "the loss of example 35 (and of 2 more) is not finite",
        ),
    ],
    ids=str,
)
def test_the_example_whose_loss_is_nan_is_named(
    flags: dict[str, Any], examples: tuple[int, ...], named: str, tmp_path: Path, workers: Workers
) -> None:
    path = write(tmp_path, (SQUARE, root(*examples)), WITH_IDS, TEST_IDS)
    with pytest.raises(TrainingError) as caught:
        in_jax(path, tmp_path / "jax", **DETECTED, **flags)
    message = in_ranks(workers, path, **DETECTED, **flags)
    assert on_examples(str(caught.value)) == on_examples(message) == named
    assert (
        str(caught.value).partition("its batch ")[2].split(";")[0] == message.partition("its batch ")[2].split(";")[0]
    )
