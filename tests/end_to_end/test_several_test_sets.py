"""Several test sets by name: their metrics carry the names, in both trainers; the first, or a named one, judges."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxddp.config import TrainerConfig
from jaxddp.data.run_data import load_data
from jaxddp.errors import InputError, TrainingError
from jaxddp.program import program_of
from tests.support.run_files import assert_same, in_jax, in_torch, start, write

TEST = "def test_data():\n    return data(21, 1)\n"
SEVERAL = "def test_data():\n    return {'clean': data(21, 1), 'noisy': data(10, 2)}\n"
RUNS = pytest.mark.parametrize("train", [in_jax, in_torch])


def test_each_set_has_the_metrics_that_it_has_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = start(tmp_path)
    path = write(tmp_path, (TEST, SEVERAL))
    of_jax, of_torch = (train(path, tmp_path / train.__name__, weights=weights) for train in (in_jax, in_torch))
    assert_same(of_jax, of_torch)
    printed = capsys.readouterr().out
    assert printed.count("  test clean_loss ") == printed.count("  noisy_error ") == 4
    assert json.loads((tmp_path / "in_jax" / "data.json").read_text()).keys() == {"train", "test_clean", "test_noisy"}
    for name, data in (("clean", "data(21, 1)"), ("noisy", "data(10, 2)")):
        alone = write(tmp_path, (TEST, f"def test_data():\n    return {data}\n"), name=f"{name}.py")
        for record, expected in zip(of_jax, in_jax(alone, tmp_path / name, weights=weights), strict=True):
            for metric in ("loss", "error"):
                assert record[f"test_{name}_{metric}"] == pytest.approx(expected[f"test_{metric}"], rel=1e-12)


@RUNS
@pytest.mark.parametrize(("metric", "count"), [("error", 2), ("clean_error", 2), ("noisy_error", 4)])
def test_the_first_set_or_a_named_one_judges(
    metric: str, count: int, train: Callable[..., Any], tmp_path: Path
) -> None:
    """The error of the noisy set, which is negative, alone grows."""
    signed = "def signed(of, sign):\n    return {**of, 'sign': np.full(len(of['y']), sign)}\n\n\n"
    sets = "def test_data():\n    return {'clean': signed(data(21, 1), 1.0), 'noisy': signed(data(10, 2), -1.0)}\n"
    path = write(
        tmp_path, (TEST, signed + sets), ('abs(outputs - batch["y"])', 'abs(outputs - batch["y"]) * batch["sign"]')
    )
    flags = {"early_stopping_patience": 1, "best_mode": "max", "best_metric": metric, "devices": 1}
    epochs = train(path, tmp_path / "run", epochs=4, weights=start(tmp_path), keep_best=True, **flags)
    assert "test_noisy_loss" in epochs[0] and "test_loss" not in epochs[0]
    assert len(epochs) == count and (tmp_path / "run" / "model_best.safetensors").exists()


@RUNS
def test_a_set_whose_loss_is_not_finite_is_named(train: Callable[..., Any], tmp_path: Path) -> None:
    data = "{'clean': data(21, 1), 'noisy': {n: np.full_like(x, np.nan) for n, x in data(9, 2).items()}}"
    path = write(tmp_path, (TEST, f"def test_data():\n    return {data}\n"))
    with pytest.raises(
        TrainingError, match=r"^test noisy_loss is nan at step .*test_data\(\)\['noisy'\]: example 0: x"
    ):
        train(path, tmp_path / "run", epochs=1)


BATCH = {"x": [1.0, 2.0], "y": [0.0, 1.0]}
NESTED = {"a": {"x": [1.0]}, "b": {"y": [1.0]}}


@pytest.mark.parametrize(
    ("train", "test", "names"),
    [
        (BATCH, BATCH, [""]),
        (BATCH, {"clean": BATCH, "noisy": BATCH}, ["clean_", "noisy_"]),
        (BATCH, {"clean": [{"x": 1.0, "y": 2.0}], "noisy": (np.ones(1), np.ones(1))}, ["clean_", "noisy_"]),
        (BATCH, {"one": BATCH}, ["one_"]),
        (BATCH, [{"x": 1.0, "y": 2.0}], [""]),
        (BATCH, {"x": [1.0], "y": [2.0], "mask": None}, [""]),
        (NESTED, NESTED, [""]),  # a batch, as the training data are
        (NESTED, {"clean": NESTED, "noisy": NESTED}, ["clean_", "noisy_"]),
        (NESTED, {"b": {"y": [1.0]}}, [""]),
        ([{"a": 1.0}], {"z": [1.0, 2.0]}, [""]),
    ],
)
def test_a_dictionary_of_data_sets_is_several_test_sets(train: Any, test: Any, names: list[str]) -> None:
    program = program_of({"train_data": lambda: train, "test_data": lambda: test})
    data = load_data(program, TrainerConfig())
    assert [*data.tests] == names
    assert data.full_name("loss") == f"{names[0]}loss"
    assert data.full_name(f"{names[-1]}loss") == f"{names[-1]}loss"


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ({"a": NESTED, "noisy": NESTED}, "a: is an entry of a training example; must be a test set's name"),
        ({"a-1": NESTED}, "a-1: is no name for a test set; must be like clean or noisy_2"),
        ({1: NESTED}, "1: is no name for a test set; must be like clean or noisy_2"),
    ],
)
def test_an_ambiguous_dictionary_is_refused(test: Any, message: str) -> None:
    program = program_of({"train_data": lambda: NESTED, "test_data": lambda: test})
    with pytest.raises(InputError, match=rf"test_data\(\): {message}$"):
        load_data(program, TrainerConfig())
