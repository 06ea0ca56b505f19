"""jaxddp convert: both ways, and nothing lost."""

import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import load_file, save_file

from jaxddp.nn.functional import Functional
from jaxddp.parity.convert.command import run as convert
from jaxddp.parity.port import load_port
from tests.support.convert_ports import ARRANGED, MODELS, weights, write_port


@pytest.mark.one_in(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_a_round_trip_restores_the_file(model: str, dtype: torch.dtype, folder: Path) -> None:
    before = weights(write_port(model), dtype)
    safetensors.torch.save_file(before, "torch.safetensors")
    convert(["port.py", "torch.safetensors", "flax.safetensors"])
    convert(["port.py", "flax.safetensors", "back.safetensors"])
    after = safetensors.torch.load_file("back.safetensors")
    if model != "nnx":
        before["norm.num_batches_tracked"] = torch.tensor(0)  # jax has no counter, so it restarts at 0
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name
    write_port().torch_model().load_state_dict(after, strict=True)


def test_the_jax_model_computes_the_same_with_the_converted_file(folder: Path) -> None:
    convert(["port.py", "torch.safetensors", "flax.safetensors", "--to", "jax"])
    port, arrays = load_port("port.py"), load_file("flax.safetensors")
    functional = Functional(port.jax_model())
    wanted = functional.params | functional.buffers
    assert {name: (x.shape, x.dtype) for name, x in arrays.items()} == {
        name: (x.shape, x.dtype) for name, x in wanted.items()
    }
    params, buffers = ({name: arrays[name] for name in of} for of in (functional.params, functional.buffers))
    x = np.array([[0, 1, 5], [4, 2, 2]])
    module = port.torch_model()
    module.load_state_dict(safetensors.torch.load_file("torch.safetensors"))
    with torch.no_grad(), jax.default_matmul_precision("highest"):
        expected = module.train()(torch.from_numpy(x)).numpy()
        actual = functional.module(params, buffers)(x)
    assert np.abs(actual - expected).max() < 1e-4 * np.abs(expected).max()  # float32; measured: 1.3e-5


def test_every_tensor_has_a_line_of_output(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(["port.py", "torch.safetensors", "flax.safetensors"])
    lines = capsys.readouterr().out.splitlines()
    assert "embed.embedding (6, 4)  <-  embed.weight (6, 4)" in lines
    assert "attention.key.kernel (4, 2, 2)  <-  attention.in_proj_weight[4:8] (4, 4)" in lines
    assert "bn.mean (4,)  <-  norm.running_mean (4,)" in lines
    assert lines[-1] == "flax.safetensors: 14 arrays for jax, from 11 of torch.safetensors"
    assert len(lines) == 15
    convert(["port.py", "flax.safetensors", "back.safetensors", "--quiet"])
    assert capsys.readouterr().out == "back.safetensors: 11 arrays for torch, from 14 of flax.safetensors\n"


def test_tied_tensors_may_have_one_name_in_the_file(folder: Path) -> None:
    tensors = load_file("torch.safetensors")
    convert(["port.py", "torch.safetensors", "both.safetensors"])
    for name in ("embed.weight", "head.weight"):
        save_file({key: value for key, value in tensors.items() if key != name}, "one.safetensors")
        convert(["port.py", "one.safetensors", f"without {name}.safetensors"])
        assert Path(f"without {name}.safetensors").read_bytes() == Path("both.safetensors").read_bytes()


def test_stacks_parts_and_flattened_images_convert_both_ways(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("port.py").write_text(ARRANGED)
    before = weights(load_port("port.py"))
    safetensors.torch.save_file(before, "torch.safetensors")
    convert(["port.py", "torch.safetensors", "flax.safetensors"])
    lines = capsys.readouterr().out.splitlines()
    assert "blocks.b.kernel[1] (4, 4)  taken as (in, out)  <-  layers.1.weight[4:8] (4, 4)" in lines
    assert lines[-1] == "flax.safetensors: 6 arrays for jax, from 6 of torch.safetensors"
    arrays = load_file("flax.safetensors")
    np.testing.assert_array_equal(arrays["blocks.b.kernel"][1], before["layers.1.weight"][4:].T)
    np.testing.assert_array_equal(arrays["fc.kernel"][:, 1], before["fc.weight"][1].reshape(3, 2).T.ravel())
    convert(["port.py", "flax.safetensors", "back.safetensors"])
    after = safetensors.torch.load_file("back.safetensors")
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.large
def test_the_command_runs_as_a_program(folder: Path) -> None:
    command = [sys.executable, "-m", "jaxddp", "convert", "port.py", "torch.safetensors", "flax.safetensors"]
    first, again = (subprocess.run(command, capture_output=True, text=True, timeout=60) for _ in range(2))
    assert (first.returncode, first.stderr, len(first.stdout.splitlines())) == (0, "", 15)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == "error: flax.safetensors: exists; --force replaces it\n"
    assert load_file("flax.safetensors")["embed.embedding"].dtype != ml_dtypes.bfloat16
