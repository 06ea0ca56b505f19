"""A user's program in one file, trained alike by both trainers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxddp import cli
from jaxddp import train as jax_trainer
from jaxddp.config import TrainerConfig
from jaxddp.errors import InputError
from jaxddp.program import load_program, program_of
from tests.support.run_files import (
    FLAGS,
    LINE,
    LOSS_TOLERANCE,
    OF_EACH,
    OWN_OPTIMIZERS,
    READING,
    SQUARE,
    Change,
    assert_same,
    in_jax,
    in_torch,
    start,
    write,
)

ALL_NESTED: tuple[Change, ...] = (
    ('{"x": x, "y": x @ np.array([1.0, -2.0, 3.0], np.float32)}', '({"x": x}, x @ np.array([1.0, -2.0, 3.0], "f4"))'),
    ('batch["x"]', 'batch[0]["x"]'),
    ('batch["y"]', "batch[1]"),
)
ALL_LIKE_BUILT_IN: tuple[Change, ...] = (
    ("import dataclass\n", "import dataclass\nfrom typing import Optional\n"),
    ("width: int = 4\n", 'width: int = 4\n    model: str = "net"\n    dropout: Optional[float] = 7.0\n'),
)
GROUPS = """
from jaxddp import optim
from torch_ref.optim import param_groups


def jax_optimizer():
    return optim.grouped({"fc1.weight": None, "*.bias": optim.sgd(0.1), "*": optim.sgd(0.05, weight_decay=0.1)})


def configure_optimizers(model):
    biases, others = {"lr": 0.1}, {"lr": 0.05, "weight_decay": 0.1}
    return torch.optim.SGD(param_groups(model, {"fc1.weight": None, "*.bias": biases, "*": others}))
"""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ((), ""),
        (((SQUARE, f"    return {OF_EACH}\n"),), ""),
        (((SQUARE, f'    return {OF_EACH}, abs(batch["y"])\n'), (LINE, f'{LINE}\nloss_normalization = "global"')), ""),
        (((SQUARE, SQUARE.replace("mean()", 'mean(), {"largest": abs(batch["y"]).mean()}')),), ""),
        (ALL_NESTED, ""),
        (((LINE, "epochs, global_batch_size = 2, 16"),), OWN_OPTIMIZERS),
        (((LINE, "epochs, global_batch_size = 2, 16"),), GROUPS),
        (
            (
                (LINE, f'{LINE}\nevaluate_every, early_stopping_patience = "2steps", 9'),
                ("def test_data", "def nothing"),
            ),
            "",
        ),
        ((), READING),
        ((("def test_data", "def nothing"),), ""),
        (((SQUARE, SQUARE.replace("mean()", 'mean(), {"half": 0.5, "note": "text"}')),), ""),
        (ALL_LIKE_BUILT_IN, "from jaxddp.optim import schedules"),
    ],
    ids=[
        "mean",
        "per example",
        "weighted",
        "auxiliary",
        "nested",
        "optimizers",
        "groups",
        "early stopping, no test",
        "reading",
        "no test",
        "number",
        "options",
    ],
)
def test_both_trainers_log_the_same_numbers(changes: tuple[Change, ...], more: str, tmp_path: Path) -> None:
    path, weights = write(tmp_path, *changes, more=more), start(tmp_path)
    one = in_jax(path, tmp_path / "jax", weights=weights)
    other = in_torch(path, tmp_path / "torch", weights=weights)
    assert_same(one, other)
    assert one[-1]["train_loss"] < one[0]["train_loss"]
    assert ("test_loss" in one[0]) == ("test_error" in one[0]) == ("def nothing" not in path.read_text())


@pytest.mark.parametrize("writer", ["jax", "torch"])
def test_each_trainer_starts_from_weights_under_either_sides_names(writer: str, tmp_path: Path) -> None:
    """The JAX side's layers have other names, and the file of each side is read by both."""
    renamed = (("self.fc1 = nnx", "self.hidden = nnx"), ("nnx.tanh(self.fc1(x))", "nnx.tanh(self.hidden(x))"))
    path = write(tmp_path, *renamed, more='names = {"hidden": "fc1"}\n')
    of_start = in_jax if writer == "jax" else in_torch
    of_start(path, tmp_path / "start", weights=start(tmp_path), epochs=0)
    weights = str(tmp_path / "start" / "model.safetensors")
    assert ("hidden.kernel" in load_file(weights)) == (writer == "jax")
    one, other = in_jax(path, tmp_path / "jax", weights=weights), in_torch(path, tmp_path / "torch", weights=weights)
    assert_same(one, other)
    assert_same(one, in_jax(path, tmp_path / "again", weights=start(tmp_path)))


EQUINOX = """
import equinox as eqx


class Linear(eqx.Module):
    kernel: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return x @ self.kernel + self.bias[None]


class Plain(eqx.Module):
    fc1: Linear
    fc2: Linear

    def __call__(self, x):
        return self.fc2(jnp.tanh(self.fc1(x)))[:, 0]


def jax_model(options):
    def layer(rows, columns): return Linear(jnp.zeros((rows, columns)), jnp.zeros(columns))
    return Plain(layer(3, options.width), layer(options.width, 1))
"""
TREE = """
def jax_model(options):
    def layer(rows, columns): return {"kernel": jnp.zeros((rows, columns)), "bias": jnp.zeros(columns)}
    return {"fc1": layer(3, options.width), "fc2": layer(options.width, 1)}


def predict(model, batch):
    if not isinstance(model, dict):
        return model(batch["x"])
    hidden = jnp.tanh(batch["x"] @ model["fc1"]["kernel"] + model["fc1"]["bias"][None])
    return (hidden @ model["fc2"]["kernel"] + model["fc2"]["bias"][None])[:, 0]


def jax_loss(model, batch, train, key):
    assert key.shape == () and train in (True, False)
    return ((predict(model, batch) - batch["y"]) ** 2).mean()
"""
LINEN = """
from flax import linen


class OfLinen(linen.Module):
    width: int

    @linen.compact
    def __call__(self, x):
        return linen.Dense(1, name="fc2")(jnp.tanh(linen.Dense(self.width, name="fc1")(x)))[:, 0]


def jax_model(options):
    return OfLinen(options.width)
"""


@pytest.mark.parametrize("more", [EQUINOX, TREE, LINEN], ids=["equinox", "tree", "linen"])
def test_models_of_every_library_train_alike(more: str, tmp_path: Path) -> None:
    weights = start(tmp_path)
    expected = in_torch(write(tmp_path), tmp_path / "torch", weights=weights)
    path = write(tmp_path, more=more, name="other.py")
    assert_same(in_jax(path, tmp_path / "jax", weights=weights), expected)


def test_options_are_flags_and_flags_override_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write(tmp_path))
    program, config = cli.program_and_flags([path, "--width", "7", "--lr", "0.1"], TrainerConfig, "train")
    assert program.path == Path(path)
    assert (config.epochs, config.global_batch_size, config.optimizer, config.lr) == (2, 16, "sgd", 0.1)
    assert program.bound(config).get("jax_model")().fc1.kernel.shape == (3, 7)
    with pytest.raises(SystemExit):
        cli.program_and_flags(["--help", path], TrainerConfig, "train")
    shown = capsys.readouterr().out
    assert "--width INT" in shown and "Width of the hidden layer. (default: 4)" in shown and "(default: sgd)" in shown


def test_a_namespace_trains_from_python_without_a_file(tmp_path: Path) -> None:
    path, weights = write(tmp_path), start(tmp_path)
    expected = in_jax(path, tmp_path / "run", weights=weights)
    names = load_program(path)
    space = SimpleNamespace(**names.values, Options=names.options, global_batch_size=16, optimizer="sgd", lr=0.05)
    result = jax_trainer.run(space, epochs=np.int64(2), weights=Path(weights), output=tmp_path / "space", **FLAGS)
    assert result.metrics["loss"] == pytest.approx(expected[-1]["test_loss"], rel=LOSS_TOLERANCE)
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert saved.keys() == result.weights.keys() == load_file(weights).keys()
    assert all(np.array_equal(saved[name], result.weights[name]) for name in saved)
    with pytest.raises(InputError, match=r"^epoch: not an option; did you mean epochs\?$"):
        jax_trainer.run(space, epoch=2)
    with pytest.raises(InputError, match=r"^epochs = 1\.5: must be int$"):
        jax_trainer.run(space, epochs=1.5)


def test_one_side_suffices_for_its_trainer(tmp_path: Path) -> None:
    jax_only = write(tmp_path, ("def torch_model", "def nothing"))
    in_jax(jax_only, tmp_path / "jax", epochs=1)
    with pytest.raises(InputError, match=r"run\.py: has no torch_model, which torch_ref\.train needs$"):
        in_torch(jax_only, tmp_path / "torch")
    torch_only = write(tmp_path, ("def jax_model", "def nothing"), name="torch_only.py")
    in_torch(torch_only, tmp_path / "torch", epochs=1)
    with pytest.raises(InputError, match=r"torch_only\.py: has no jax_model, which jaxddp\.train needs$"):
        in_jax(torch_only, tmp_path / "other")


def test_program_of_takes_modules_and_mappings() -> None:
    from jaxddp.programs import classifier

    assert program_of(classifier).get("title") is classifier.title
    assert program_of({"train_data": dict, "epochs": 3}).defaults == {"epochs": 3}


@pytest.mark.parametrize(
    ("names", "flags"),
    [
        ({"train_data": dict}, {"optimizer": "sgd", "lr": 0.1, "ema_decay": 0.9, "clip_grad_norm": 1.0}),
        ({"train_data": dict, "jax_optimizer": dict}, {"optimizer": "sgd", "ema_decay": 0.9, "clip_grad_norm": 1.0}),
        ({"train_data": dict, "torch_step": dict}, {"optimizer": "sgd", "lr": 0.1, "clip_grad_norm": 1.0}),
        ({"batch": dict}, {"optimizer": "sgd", "clip_grad_norm": 1.0}),
    ],
)
def test_a_name_sets_a_flag_only_where_the_flag_has_an_effect(names: dict[str, Any], flags: dict[str, Any]) -> None:
    """Elsewhere it is a variable of the file's code."""
    variables = {"optimizer": "sgd", "lr": 0.1, "ema_decay": 0.9, "clip_grad_norm": 1.0, "output": "runs/a"}
    assert program_of({**names, **variables}).defaults == flags


def test_options_of_another_optimizer_stay_behind(tmp_path: Path) -> None:
    path = str(write(tmp_path, more="optimizer, lr, momentum = 'sgd', 0.1, 0.9"))
    _, config = cli.program_and_flags([path, "--optimizer", "adam"], TrainerConfig, "train")
    assert config.optimizer_options() == {"lr": 0.1}


def test_a_state_without_a_twin_starts_from_the_models_own_values(tmp_path: Path) -> None:
    state = """
no_twin = ("counter.mean",)


def jax_model(options):
    def layer(rows, columns): return {"kernel": jnp.zeros((rows, columns)), "bias": jnp.zeros(columns)}
    params = {"fc1": layer(3, options.width), "fc2": layer(options.width, 1)}
    return params, {"counter": {"steps": jnp.int32(7), "mean": jnp.ones(3)}}


def predict(params, state, batch):
    return tree_predict(params, batch)


def jax_loss(params, state, batch):
    return ((predict(params, state, batch) - batch["y"]) ** 2).mean(), state


metrics = None
"""
    path = write(tmp_path, more=TREE.replace("predict(", "tree_predict(") + state)
    result = jax_trainer.run(path, epochs=0, weights=start(tmp_path), **FLAGS)
    assert result.state.params["fc1.bias"][0].any() and int(result.state.buffers["counter.steps"].flatten()[0]) == 7
