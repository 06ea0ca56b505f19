"""The examples run and show what they claim."""

import importlib.util
import sys
from pathlib import Path

import pytest

from jaxddp.config import MODELS, OPTIMIZERS

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_model_of_ones_own_learns_the_sine():
    assert load("own_model").main() < 0.005  # [0.0017; the mean of the sine's square is 0.5]


@pytest.mark.parametrize("model", MODELS)
def test_both_trainers_print_the_same_losses(model, capsys):
    """Every model with every optimizer on 2 devices, to 6 digits, one epoch of the real data."""
    side_by_side = load("side_by_side")
    options = side_by_side.Options(models=(model,), epochs=1, global_batch_size=96)
    assert side_by_side.main(options) == 0, capsys.readouterr().out
    assert capsys.readouterr().out.count("equal") == len(OPTIMIZERS) + 1


def test_a_difference_in_the_sixth_digit_is_reported(monkeypatch, capsys):
    side_by_side = load("side_by_side")
    monkeypatch.setattr(side_by_side, "losses", lambda module, flags: [f"{module == 'jaxddp.train':.6f}"])
    assert side_by_side.main(side_by_side.Options(models=("mlp",), optimizers=("sgd",))) == 1
    assert "DIFFERENT" in capsys.readouterr().out
