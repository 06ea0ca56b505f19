"""Plain scripts of examples/ddp_script: torch and jaxddp train the same, and the guide shows their lines."""

import dataclasses
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors

from examples.arrays import Arrays, furthest
from examples.ddp_script import plain_jax, plain_torch
from jaxddp import DistributedDataParallel, Replicas, cross_entropy, optim, prepare
from jaxddp.data.torch_rng import Generator
from jaxddp.distributed.ports import free_port
from jaxddp.errors import DriftError

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "ddp_script.md").read_text()
SCRIPTS = [(ROOT / "examples" / "ddp_script" / f"plain_{name}.py").read_text() for name in ("torch", "jax")]
WEIGHTS = "runs/plain_jax.safetensors"
SAME = 1e-5  # in float32, relative to a tensor's largest weight; measured: 9e-7
MOST_LINES = 69


def in_two_processes(script: str, folder: Path) -> str:
    """Run a script under torchrun in a folder; return what it prints."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [*torchrun, "-m", f"examples.ddp_script.{script}"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def in_one_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Arrays:
    """Run the jaxddp script here on two replicas; return the weights that it saves."""
    monkeypatch.chdir(folder)
    plain_jax.main(Replicas(prepare(2, "cpu")))
    return load_file(WEIGHTS)


@pytest.fixture(scope="module")
def of_torch(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Arrays]:
    """Return what the torch script prints, and its weights."""
    folder = tmp_path_factory.mktemp("torch")
    printed = in_two_processes("plain_torch", folder)
    tensors = torch.load(folder / "runs" / "plain_torch.pt", weights_only=True)
    return printed, {name: tensor.numpy() for name, tensor in tensors.items()}


def test_the_scripts_print_the_same_losses_and_end_with_the_same_weights(
    of_torch: tuple[str, Arrays], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed, weights = of_torch
    assert furthest(in_one_process(tmp_path, monkeypatch), weights) < SAME
    assert capsys.readouterr().out == printed and printed.count("\n") == plain_torch.EPOCHS
    assert plain_torch.Net().load_state_dict(load_tensors(WEIGHTS)).missing_keys == []


@pytest.mark.large
@pytest.mark.parametrize(("name", "value"), [("MAX_NORM", 0.501), ("LR", 1.001e-2), ("EPOCHS", 4)])
def test_another_setting_ends_with_other_weights(
    name: str, value: float, of_torch: tuple[str, Arrays], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_jax, name, value)
    assert furthest(in_one_process(tmp_path, monkeypatch), of_torch[1]) > 10 * SAME


@pytest.mark.large
def test_two_processes_train_like_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = in_one_process(tmp_path, monkeypatch)
    (tmp_path / WEIGHTS).unlink()
    assert in_two_processes("plain_jax", tmp_path) == capsys.readouterr().out
    assert furthest(load_file(WEIGHTS), one) < SAME  # measured: 0


def test_the_scripts_are_short_and_the_torch_one_needs_only_torch() -> None:
    assert max(script.count("\n") for script in SCRIPTS) <= MOST_LINES
    imported = set(re.findall(r"^(?:from|import) (\w+)", SCRIPTS[0], re.MULTILINE))
    assert imported == {"contextlib", "pathlib", "numpy", "torch"}


def test_the_guide_shows_lines_of_the_scripts_in_pairs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2 * 8 and all(2 <= block.count("\n") <= 8 for block in blocks)
    for number, block in enumerate(blocks):
        indented = [textwrap.indent(block, " " * 4 * level) for level in range(5)]
        assert any(f"\n{lines}" in SCRIPTS[number % 2] for lines in indented), block


def test_verify_reports_the_line_of_the_guide() -> None:
    replicas = Replicas(prepare(2, "cpu"))
    ddp = DistributedDataParallel(plain_jax.Net(Generator(0)), optim.adamw(), cross_entropy, replicas=replicas)
    state = ddp.init()
    kernel = state.params["inner.kernel"]
    copies = [shard.data for shard in kernel.addressable_shards]
    copies[1] = jax.device_put(np.asarray(copies[1]) + np.float32(1e-3), replicas.devices[1])
    other = jax.make_array_from_single_device_arrays(kernel.shape, kernel.sharding, copies)
    with pytest.raises(DriftError) as error:
        ddp.verify(dataclasses.replace(state, params={**state.params, "inner.kernel": other}))
    assert str(error.value) in " ".join(GUIDE.split())
    ddp.verify(state)
