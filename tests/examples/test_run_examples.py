"""Programs in examples/: both trainers compute the same losses from files of data, and the check says equal."""

import ast
import dataclasses
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file

from jaxddp import TrainConfig, cli
from jaxddp import train as jax_trainer
from jaxddp.config import TrainerConfig
from jaxddp.nn.functional import Functional
from jaxddp.nn.torch_weights import from_torch
from jaxddp.parity.checking import check
from jaxddp.parity.report.sentences import sentences as sentences_of
from jaxddp.parity.workers import Workers
from jaxddp.program import default_config, load_program
from tests.support.train_runs import records
from torch_ref.config import TorchTrainerConfig
from torch_ref.distributed import World
from torch_ref.train import train as torch_train

EXAMPLES = Path(__file__).parents[2] / "examples"
MOST_LINES = 150
TRAINERS: dict[str, Any] = {"jaxddp.train": TrainerConfig, "torch_ref.train": TorchTrainerConfig}
LOSS_TOLERANCE = 1e-11  # relative, in float64; measured: 2e-16 to 8e-13
LOGITS_TOLERANCE = 1e-6  # relative to the largest, in float32; measured: 0 in torch, 1.3e-7 in JAX


def tokens(folder: Path) -> None:
    """Write token files as nanoGPT does: 15 windows of 16 tokens for training, 5 held out."""
    rng = np.random.default_rng(0)
    for name, size in (("train", 241), ("val", 81)):
        rng.integers(0, 50, size, dtype=np.uint16).tofile(folder / f"{name}.bin")


def records_of_cifar(folder: Path) -> None:
    """Write two files of 10 images each, and one of 5, in the format of CIFAR-10."""
    rng = np.random.default_rng(0)
    for name, size in (("data_batch_1", 10), ("data_batch_2", 10), ("test_batch", 5)):
        rows = rng.integers(0, 256, (size, 3073), dtype=np.uint8)
        rows[:, 0] %= 10
        rows.tofile(folder / f"{name}.bin")


def images(folder: Path) -> None:
    """Write folders of images of several sizes."""
    rng = np.random.default_rng(0)
    for part, size in (("train", 9), ("val", 3)):
        for label in ("cat", "dog"):
            (folder / part / label).mkdir(parents=True)
            for i in range(size):
                pixels = rng.integers(0, 256, (8 + i, 10, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / label / f"{i}.png")


def clicks(folder: Path) -> None:
    """Write a log of clicks as DLRM's preprocessing does."""
    rng = np.random.default_rng(0)
    counts, rows = rng.integers(0, 9, (42, 13)), rng.integers(0, (5, 3), (42, 2))
    np.savez(folder / "log.npz", X_int=counts, X_cat=rows, y=rng.integers(0, 2, 42), counts=(5, 3))


def sentences(folder: Path) -> None:
    """Write pairs of sentences as MRPC has them: 20 for training, 5 held out."""
    pairs = (f"{i % 2}\t{i}\t{i}\tIt is {i}.\tThis is {i + 1 - i % 2}.\n" for i in range(25))
    (folder / "pairs.txt").write_text("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n" + "".join(pairs))


def nothing(folder: Path) -> None:
    """Write nothing: the data are those of the example."""


SMALL: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "mine": (nothing, {"width": 16, "global_batch_size": 128}),
    "gpt2": (tokens, {"layers": 1, "width": 16, "heads": 2, "context": 16, "vocab": 50, "warmup_steps": 2}),
    "resnet18": (records_of_cifar, {"width": 2, "devices": 1}),  # BatchNorm sees the batch of a replica
    "recommender": (clicks, {"bottom": (8,), "top": (8,)}),
    "vae": (nothing, {"width": 16, "global_batch_size": 128}),
    "diffusion": (nothing, {"width": 8, "global_batch_size": 128}),
    "dqn": (nothing, {"width": 8, "transitions": 100, "global_batch_size": 16}),
    "vit": (images, {"depth": 1, "width": 16, "heads": 2, "classes": 2, "warmup_steps": 2}),
    "fine_tune": (sentences, {}),
}
FILES = {name: {"data": ""} for name in ("resnet18", "vit")}
FILES |= {"gpt2": {"tokens": ""}, "recommender": {"log": "log.npz"}, "fine_tune": {"data": "pairs.txt"}}
OTHER_WEIGHTS = ("mine", "fine_tune")  # whose sides do not start from the same weights by themselves
BROKEN = {  # an example with a change of its JAX side: the first stage that differs, its tensor, its cause
    "vae": (
        "jnp.exp(log_variance / 2)",
        "jnp.exp(log_variance)",
        "local_loss",
        "loss",
        "div by 2 left out of log_variance",
    ),
    "dqn": (
        "model.target), options.polyak",
        "model.target), 1 - options.polyak",
        "update",
        "target.",
        "lerp_'s weight 0.98, the reference has 0.02 in the update of target.*",
    ),
}


@pytest.fixture(scope="module")
def pair() -> Iterator[Workers]:
    with Workers(2, "cpu") as workers:
        yield workers


def losses(folder: Path) -> list[float]:
    return [value for record in records(folder) for name, value in record.items() if name.endswith("loss")]


@pytest.mark.parametrize("name", SMALL)
def test_an_example_is_one_short_file(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= MOST_LINES and "from examples" not in text


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [name for name in SMALL if name != "mine"])  # whose commands the README shows
def test_the_commands_of_an_example_have_flags_that_exist(name: str) -> None:
    text = (ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())) or "").replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("    ")]
    commands = [words[2:] for words in lines if words[:2] == ["python", "-m"]]
    commands += [["jaxddp.train", *words[2:]] for words in lines if words[:2] == ["jaxddp", "train"]]
    assert {module for module, *_ in commands} >= TRAINERS.keys()
    for module, file, *flags in commands:
        for trainer, config in TRAINERS.items():  # torchrun takes the flags of jaxddp.train
            if module in TRAINERS:
                cli.program_and_flags([str(EXAMPLES.parent / file), *flags], config, trainer)


@pytest.mark.large
@pytest.mark.parametrize("name", SMALL)
def test_both_trainers_compute_the_same_losses(name: str, tmp_path: Path) -> None:
    write, options = SMALL[name]
    write(tmp_path)
    flags = {"epochs": 2, "global_batch_size": 4, "devices": 2, "platform": "cpu", "dtype": "float64", **options}
    flags |= {flag: str(tmp_path / file) for flag, file in FILES.get(name, {}).items()}
    path = EXAMPLES / f"{name}.py"
    config = dataclasses.replace(default_config(load_program(path), TorchTrainerConfig), strategy="single", **flags)
    if name in OTHER_WEIGHTS:
        torch_train(World(), dataclasses.replace(config, epochs=0, output=str(tmp_path / "start")))
        flags["weights"] = str(tmp_path / "start" / "model.safetensors")
    jax_trainer.run(path, output=str(tmp_path / "jax"), **flags)
    torch_train(World(), dataclasses.replace(config, output=str(tmp_path / "torch"), weights=flags.get("weights")))
    assert losses(tmp_path / "jax") == pytest.approx(losses(tmp_path / "torch"), rel=LOSS_TOLERANCE, abs=0)


@pytest.mark.large
@pytest.mark.parametrize("name", SMALL)
def test_the_check_says_equal(name: str, pair: Workers) -> None:
    steps = 10 if name == "resnet18" else 3  # float32 crosses kinks of its ReLUs in a quarter of the steps
    report = check(EXAMPLES / f"{name}.py", world_size=2, steps=steps, workers=pair)
    assert report.verdict == "equal", str(report)


@pytest.mark.large
@pytest.mark.parametrize("name", BROKEN)
def test_the_report_on_a_broken_example_ends_at_the_mistake(name: str, tmp_path: Path, pair: Workers) -> None:
    right, wrong, stage, tensor, cause = BROKEN[name]
    text = (EXAMPLES / f"{name}.py").read_text()
    assert text.count(right) == 1
    (tmp_path / f"{name}.py").write_text(text.replace(right, wrong))
    found = check(tmp_path / f"{name}.py", world_size=2, steps=3, workers=pair).differences[0]
    assert found.stage == stage and found.tensor.startswith(tensor), found
    assert found.cause is not None and sentences_of(found.cause) == (cause,)


@pytest.mark.large
def test_gpt2_loads_hugging_faces_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)).eval()
    theirs.save_pretrained(tmp_path, safe_serialization=True)
    stored = load_file(tmp_path / "model.safetensors")
    masks = {f"h.{i}.attn.bias": np.ones((1, 1, 16, 16), np.float32) for i in range(2)}  # of the published file
    save_file(
        {name.removeprefix("transformer."): x for name, x in stored.items()} | masks, tmp_path / "model.safetensors"
    )
    monkeypatch.setattr(
        sys, "argv", ["gpt2.py", *(str(tmp_path / f"{name}.safetensors") for name in ("model", "start"))]
    )
    module = runpy.run_path(str(EXAMPLES / "gpt2.py"), run_name="__main__")

    options, start = (
        module["Options"](vocab=50, context=16, width=16, heads=2),
        load_file(tmp_path / "start.safetensors"),
    )
    x = np.random.default_rng(0).integers(0, 50, (2, 16))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(x)).logits.numpy()
        model = module["torch_model"](options)
        model.load_state_dict({name: torch.from_numpy(value) for name, value in start.items()})
        in_torch = model(torch.from_numpy(x)).numpy()
    functional = Functional(module["jax_model"](options, TrainConfig()))
    in_flax = functional.module(*from_torch(start, functional.params, functional.buffers))(x)
    for logits in (in_torch, np.asarray(in_flax)):
        assert np.abs(logits - expected).max() < LOGITS_TOLERANCE * np.abs(expected).max()
