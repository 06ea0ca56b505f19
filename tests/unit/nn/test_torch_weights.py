"""Weights convert between flax and torch without loss, and weights that do not fit are refused."""

import errno
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.torch
import torch
from flax import nnx
from jax import numpy as jnp

import torch_ref.weights
from jaxddp import models
from jaxddp.data.torch_rng import Generator
from jaxddp.errors import InputError
from jaxddp.nn import torch_weights
from jaxddp.nn.functional import Functional
from jaxddp.nn.torch_weights import from_torch, load_weights, save_weights, start_values, to_torch
from torch_ref import models as torch_models

SIZES: dict[str, dict[str, Any]] = {
    "Linear": {"in_features": 6, "num_classes": 3},
    "MLP": {"in_features": 6, "hidden_sizes": (5, 4), "num_classes": 3},
    "CharMLP": {"vocab_size": 9, "context_length": 3, "embedding_size": 4, "hidden_size": 6},
    "ConvNet": {"in_channels": 2, "channels": (3, 4), "num_classes": 3},
}


def twins(name: str) -> tuple[Functional, torch.nn.Module]:
    """Build the model in both frameworks, with different weights."""
    torch.manual_seed(1)
    module = getattr(models, name)(**SIZES[name], generator=Generator(0))
    return Functional(module), getattr(torch_models, name)(**SIZES[name])


def changed_weights(functional: Functional) -> tuple[dict, dict]:
    """Return parameters and buffers that all differ from their initial values."""

    def changed(arrays: dict[str, jax.Array]) -> dict[str, np.ndarray]:
        return {name: np.array(value + 1) for name, value in arrays.items()}

    return changed(functional.params), changed(functional.buffers)


def check_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        np.testing.assert_array_equal(actual[name], value, name)


@pytest.mark.parametrize("name", SIZES)
def test_a_saved_model_loads_into_its_torch_twin_and_back(name: str, tmp_path: Path) -> None:
    functional, twin = twins(name)
    params, buffers = changed_weights(functional)
    save_weights(tmp_path / "ours.safetensors", to_torch({**params, **buffers}))
    ours = safetensors.torch.load_file(tmp_path / "ours.safetensors")
    assert {n: x.dtype for n, x in ours.items()} == {n: x.dtype for n, x in twin.state_dict().items()}  # int64 counters
    twin.load_state_dict(ours, strict=True)
    safetensors.torch.save_file(twin.state_dict(), tmp_path / "torchs.safetensors")
    back = from_torch(load_weights(tmp_path / "torchs.safetensors"), functional.params, functional.buffers)
    check_same(back[0], params)
    check_same(back[1], buffers)


def test_weights_do_not_share_memory_with_their_source() -> None:
    """Torch changes its tensors in place when training continues, and jax would share aligned ones without a copy."""
    functional, _ = twins("Linear")
    memory = np.zeros(256, "uint8")
    start = -memory.ctypes.data % 64
    bias = memory[start : start + 12].view("float32")
    tensors = {**to_torch(functional.params), "fc.bias": bias}
    params, _ = from_torch(tensors, functional.params, {})
    planted = jnp.asarray(bias, "float32")
    bias += 1
    assert not np.asarray(params["fc.bias"]).any()
    assert np.asarray(planted).all()


@pytest.mark.parametrize(
    ("name", "jax_shape", "torch_shape"),
    [
        ("fc.kernel", (3, 2), (2, 3)),
        ("conv.kernel", (5, 7, 3, 2), (2, 3, 5, 7)),
        ("conv1d.kernel", (5, 3, 2), (2, 3, 5)),
        ("embedding.embedding", (3, 2), (3, 2)),
        ("bias", (3,), (3,)),
    ],
)
def test_layouts_convert_to_torch_and_back(name: str, jax_shape: tuple[int, ...], torch_shape: tuple[int, ...]) -> None:
    value = np.arange(np.prod(jax_shape)).reshape(jax_shape)
    tensor = torch_weights.to_torch_layout(name, value)
    assert tensor.shape == torch_shape
    np.testing.assert_array_equal(torch_weights.from_torch_layout(name, tensor), value)
    assert to_torch({name: value})[torch_weights.torch_name(name)].flags.c_contiguous


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        ({"fc2.bias": None}, "missing fc2.bias"),
        ({"fc3.bias": np.zeros(1)}, "left over fc3.bias"),
        ({"fc2.weight": np.zeros((6, 9))}, r"fc2.weight has shape \(6, 9\) and not \(9, 6\)"),
        ({"bn.running_mean": np.zeros((6, 1))}, r"bn.running_mean has shape \(6, 1\) and not \(6,\)"),
        (
            {"fc2.bias": None, "fc2.b": np.zeros(9), "bn.running_var": None},
            "left over fc2.b; missing bn.running_var; missing fc2.bias",
        ),
    ],
    ids=["missing", "left over", "transposed", "of another rank", "several"],
)
def test_all_tensors_that_do_not_fit_are_listed(change: dict[str, Any], problems: str) -> None:
    functional, twin = twins("CharMLP")
    tensors = {name: value.numpy() for name, value in twin.state_dict().items()} | change
    tensors = {name: value for name, value in tensors.items() if value is not None}
    with pytest.raises(InputError, match=f"^weights do not fit the model: {problems}$"):
        from_torch(tensors, functional.params, functional.buffers)


@pytest.mark.parametrize("content", [None, b"", b"not safetensors at all", b"\x80\x04K\x01."])
def test_files_other_than_safetensors_are_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=rf"^--weights {path}: not a readable safetensors file \("):
        load_weights(path)


def read_start(name: str, path: Path, by: str) -> dict[str, Any]:
    """Read the start of a run by jaxddp or by torch_ref; return the values under torch's names."""
    functional, twin = twins(name)
    if by == "jaxddp":
        params, buffers = start_values(path, functional.params, functional.buffers)
        return to_torch({**params, **buffers})
    torch_ref.weights.load_weights(path, twin)
    return {name: value.numpy() for name, value in twin.state_dict().items()}


FLOATS = "must be float64, float32, float16 or bfloat16"


@pytest.mark.parametrize("by", ["jaxddp", "torch_ref"])
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fc.bias", lambda x: x.to(torch.int8), f"fc.bias is I8; {FLOATS}"),
        ("fc.bias", lambda x: x.to(torch.uint8), f"fc.bias is U8; {FLOATS}"),
        ("fc.bias", lambda x: x > 0, f"fc.bias is BOOL; {FLOATS}"),
        ("fc.bias", lambda x: x.to(torch.int64), f"fc.bias is int64; {FLOATS}"),
        ("fc.bias", lambda x: x.to(torch.complex64), f"fc.bias is C64; {FLOATS}"),
        ("fc.bias", lambda x: x.to(torch.float8_e4m3fn), f"fc.bias is F8_E4M3; {FLOATS}"),
        ("fc.bias", lambda x: x * torch.nan, r"fc.bias\[0\] is nan; must be finite in float32"),
        ("fc.weight", lambda x: torch.where(x == x.max(), torch.inf, x), r"fc.weight\[.*\] is inf; must be finite"),
        ("fc.weight", lambda x: x.double() * 1e300, r"fc.weight\[0, 0\] is -?\d.*e\+\d+; must be finite in float32"),
        ("bn.num_batches_tracked", lambda x: x.float(), "bn.num_batches_tracked is float32; must be int64 or int32"),
    ],
)
def test_types_and_values_that_do_not_fit_are_refused_by_name(
    name: str, change: Any, message: str, by: str, tmp_path: Path
) -> None:
    model = "CharMLP" if name.startswith("bn") else "Linear"
    tensors = twins(model)[1].state_dict()
    path = tmp_path / "w.safetensors"
    safetensors.torch.save_file(tensors | {name: change(tensors[name])}, path)
    with pytest.raises(InputError, match=f"^--weights {path}: {message}"):
        read_start(model, path, by)


@pytest.mark.parametrize("by", ["jaxddp", "torch_ref"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_any_type_of_floating_point_numbers_is_taken(dtype: torch.dtype, by: str, tmp_path: Path) -> None:
    tensors = {name: 3 * x.to(dtype) for name, x in twins("Linear")[1].state_dict().items()}
    safetensors.torch.save_file(tensors, tmp_path / "w.safetensors")
    check_same(
        read_start("Linear", tmp_path / "w.safetensors", by), {name: x.float().numpy() for name, x in tensors.items()}
    )


@pytest.mark.parametrize("by", ["jaxddp", "torch_ref"])
def test_nobody_waits_for_a_pipe_or_reads_a_device(by: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(InputError, match=f"^--weights {path}: is a pipe, .*; must be a regular file$"):
            read_start("Linear", path, by)


def test_saving_replaces_a_file_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, old, new = tmp_path / "w.safetensors", {"w": np.zeros(3)}, {"w": np.ones(3)}
    save_weights(path, to_torch(old))

    def full(descriptor: int) -> None:
        os.truncate(descriptor, 10)
        raise OSError(errno.ENOSPC, "disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="disk full"):
            save_weights(path, to_torch(new))
    check_same(load_weights(path), old)
    save_weights(path, to_torch(new))
    check_same(load_weights(path), new)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_weights_of_a_user_defined_module_convert() -> None:
    class UserDefined(nnx.Module):
        def __init__(self) -> None:
            self.temperature = nnx.Param(jnp.ones(()))
            self.norm = nnx.LayerNorm(4, rngs=nnx.Rngs(0))

    functional = Functional(UserDefined())
    twin = torch.nn.Module()
    twin.temperature, twin.norm = torch.nn.Parameter(torch.zeros(())), torch.nn.LayerNorm(4)
    twin.load_state_dict({name: torch.tensor(value) for name, value in to_torch(functional.params).items()})
    assert twin.temperature == 1
