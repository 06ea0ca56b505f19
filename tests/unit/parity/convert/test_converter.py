"""Converted weights give the same outputs and convert back unchanged."""

from collections.abc import Callable
from typing import Any

import flax.linen as linen
import jax
import numpy as np
import pytest
import torch
from flax import nnx, traverse_util
from torch import nn

from jaxddp.errors import InputError
from jaxddp.nn.functional import Functional
from jaxddp.parity.convert import Converter
from jaxddp.parity.convert.converter import NamesError

TOLERANCE = 1e-12  # float64, outputs of size 1 to 22; measured: at most 1.1e-14
RNGS = nnx.Rngs(0)
SAME: dict[str, Any] = {"param_dtype": np.float64, "rngs": RNGS}


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def channels_last(x: np.ndarray) -> np.ndarray:
    return np.moveaxis(x, 1, -1)


def shapes_of(functional: Functional) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in (functional.params | functional.buffers).items()}


def perturbed(module: nn.Module) -> nn.Module:
    """Return the module in float64, with no parameter or buffer equal to 0 or 1."""
    generator = torch.Generator().manual_seed(0)
    module = module.double()
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            tensor += torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype) + 0.1
    return module.eval()


class Holder(nnx.Module):
    def __init__(self, layer: nnx.Module):
        self.layer = layer


class TorchHolder(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer


def check(torch_layer: nn.Module, flax_layer: nnx.Module, x: np.ndarray, image: bool = False, **options: Any) -> None:
    """Check that both layers give the same output with the torch layer's weights, which convert back unchanged."""
    torch_layer = perturbed(torch_layer)
    functional = Functional(Holder(flax_layer))
    converter = Converter(TorchHolder(torch_layer), shapes_of(functional), **options)
    tensors = {name: tensor.numpy() for name, tensor in TorchHolder(torch_layer).state_dict().items()}
    arrays = converter.to_jax(tensors)
    params = {name: jax.numpy.asarray(arrays[name]) for name in functional.params}
    buffers = {name: jax.numpy.asarray(arrays[name]) for name in functional.buffers}
    model = functional.module(params, buffers)
    model.eval()
    with torch.no_grad():
        expected = torch_layer(torch.from_numpy(x)).numpy()
    actual = np.asarray(model.layer(channels_last(x) if image else x))
    assert np.abs(actual - (channels_last(expected) if image else expected)).max() < TOLERANCE
    back = converter.to_torch(arrays)
    for name, value in tensors.items():
        if not name.endswith("num_batches_tracked"):
            np.testing.assert_array_equal(back[name], value, name)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dims", [1, 2, pytest.param(3, marks=pytest.mark.large)])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions(dims: int, groups: int) -> None:
    size = (3, 2, 4)[:dims]  # not square
    torch_layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](4, 6, size, groups=groups)
    flax_layer = nnx.Conv(4, 6, size, padding="VALID", feature_group_count=groups, **SAME)
    check(torch_layer, flax_layer, random(2, 4, 5, 6, 7)[(slice(None),) * (2 + dims) + (0,) * (3 - dims)], image=True)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dims", [1, 2, pytest.param(3, marks=pytest.mark.large)])
@pytest.mark.parametrize("channels", [(4, 6), (4, 4)])
@pytest.mark.parametrize("as_gradient", [False, True])
def test_transposed_convolutions(dims: int, channels: tuple[int, int], as_gradient: bool) -> None:
    size = (3, 2, 4)[:dims]
    torch_layer = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1](*channels, size, stride=2)
    flax_layer = nnx.ConvTranspose(
        *channels, size, strides=(2,) * dims, padding="VALID", transpose_kernel=as_gradient, **SAME
    )
    x = random(2, 4, 3, 4, 5)[(slice(None),) * (2 + dims) + (0,) * (3 - dims)]
    check(torch_layer, flax_layer, x, image=True, transpose_kernel=["layer"] * as_gradient)


@pytest.mark.parametrize(
    ("torch_layer", "flax_layer", "shape", "image"),
    [
        (lambda: nn.Linear(4, 6), lambda: nnx.Linear(4, 6, **SAME), (3, 4), False),
        (lambda: nn.Linear(4, 6, bias=False), lambda: nnx.Linear(4, 6, use_bias=False, **SAME), (3, 4), False),
        (lambda: nn.BatchNorm2d(4), lambda: nnx.BatchNorm(4, epsilon=1e-5, **SAME), (3, 4, 2, 5), True),
        (lambda: nn.LayerNorm(4), lambda: nnx.LayerNorm(4, epsilon=1e-5, **SAME), (3, 4), False),
        (lambda: nn.RMSNorm(4, eps=1e-5), lambda: nnx.RMSNorm(4, epsilon=1e-5, **SAME), (3, 4), False),
        (lambda: nn.GroupNorm(2, 4), lambda: nnx.GroupNorm(4, 2, epsilon=1e-5, **SAME), (3, 4, 2, 5), True),
    ],
    ids=["linear", "no bias", "batch norm", "layer norm", "rms norm", "group norm"],
)
def test_layers(torch_layer: Callable, flax_layer: Callable, shape: tuple[int, ...], image: bool) -> None:
    check(torch_layer(), flax_layer(), random(*shape), image)


def test_embedding() -> None:
    check(nn.Embedding(7, 3), nnx.Embed(7, 3, dtype=np.float64, **SAME), np.array([[1, 6], [0, 2]]))


class Attention(nn.Module):
    def __init__(self, **options: Any):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def attend(query: jax.Array, key: jax.Array, value: jax.Array, **_: Any) -> jax.Array:
    """Compute attention in the inputs' dtype; jax's function computes logits in float32: 4e-7 away."""
    logits = jax.numpy.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    return jax.numpy.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), value)


class FlaxAttention(nnx.Module):
    def __init__(self) -> None:
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, attention_fn=attend, **SAME)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.attention(x)


def test_attention_projections() -> None:
    check(Attention(), FlaxAttention(), random(3, 5, 8))


def test_tied_weights_may_have_two_flax_twins() -> None:
    module = nn.ModuleDict({"embed": nn.Embedding(7, 3), "head": nn.Linear(3, 7, bias=False)})
    module["head"].weight = module["embed"].weight
    converter = Converter(module, {"embed.embedding": (7, 3), "head.kernel": (3, 7)})
    assert converter.tied == {"head.weight": "embed.weight"}
    arrays = converter.to_jax({name: tensor.numpy() for name, tensor in module.state_dict().items()})
    np.testing.assert_array_equal(arrays["embed.embedding"], arrays["head.kernel"].T)


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.BatchNorm(use_running_average=True, epsilon=1e-5)(linen.Dense(6)(x))
        return linen.Dense(2)(x)


@pytest.mark.large
def test_linen_models_convert_with_the_table_that_the_error_proposes() -> None:
    twin = perturbed(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)))
    x = random(3, 4)
    variables = LinenNet().init(jax.random.key(0), x)
    collections = {c: traverse_util.flatten_dict(variables[c], sep=".") for c in variables}
    shapes = {name: value.shape for arrays in collections.values() for name, value in arrays.items()}
    with pytest.raises(InputError) as caught:
        Converter(twin, shapes)
    table = {"Dense_0": "0", "BatchNorm_0": "1", "Dense_1": "2"}
    assert str(caught.value).endswith(f"; perhaps names = {table}")
    arrays = Converter(twin, shapes, table).to_jax({k: v.numpy() for k, v in twin.state_dict().items()})
    loaded = {
        c: traverse_util.unflatten_dict({n: arrays[n] for n in names}, sep=".") for c, names in collections.items()
    }
    with torch.no_grad():
        expected = twin(torch.from_numpy(x)).numpy()
    assert np.abs(LinenNet().apply(loaded, x) - expected).max() < TOLERANCE


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {"kernel": (4, 2), "bias": (2,)},
            r"names: jax's kernel \(4, 2\) cannot be torch's weight \(3, 2\); jax's bias \(2,\) cannot be torch's bias "
            r"\(3,\)$",
        ),
        ({"kernel": (2, 3)}, r"torch's bias \(3,\) has no twin in jax"),
        ({"kernel": (2, 3), "bias": (4,)}, r"jax's bias \(4,\) cannot be torch's bias \(3,\)"),
        ({"kernel": (2, 3), "bias": (3,), "scale": (3,)}, r"jax's scale \(3,\) has no twin in torch"),
    ],
)
def test_arrays_that_do_not_map_are_listed(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Converter(nn.Linear(2, 3), shapes)
    assert isinstance(caught.value, NamesError) and "no table" not in caught.value.propose().why  # one layer meets one


def test_a_wrong_layout_fails_the_check() -> None:
    """With square kernels a forgotten transposition changes no shape, only the outputs."""
    with pytest.raises(AssertionError):
        check(nn.ConvTranspose1d(4, 4, 3), nnx.ConvTranspose(4, 4, (3,), padding="VALID", **SAME), random(2, 4, 5),
              image=True, transpose_kernel=["layer"])  # fmt: skip
