"""Arrays of plain trees, Equinox and Haiku convert by their names and shapes, and convert back unchanged."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from jaxddp.parity.convert import Converter


def linear(outputs: int, inputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def convolution(outputs: int, inputs: int) -> nn.Conv1d:
    return nn.Conv1d(inputs, outputs, 3)


def transposed_convolution(outputs: int, inputs: int) -> nn.ConvTranspose1d:
    return nn.ConvTranspose1d(inputs, outputs, 2)


SQUARE: dict[str, tuple[int, ...]] = {"w": (4, 4), "b": (4,)}


def round_trip(
    module: nn.Module, shapes: dict[str, tuple[int, ...]], **options: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a torch module's tensors, and the arrays of these shapes that they become; check that they come back."""
    converter = Converter(module, shapes, **options)
    tensors = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    arrays = converter.to_jax(tensors)
    for name, value in converter.to_torch(arrays).items():
        np.testing.assert_array_equal(value, tensors[name], name)
    assert {name: array.shape for name, array in arrays.items()} == shapes
    return tensors, arrays


@pytest.mark.parametrize(
    ("leaf", "shape", "transposed"),
    [("w", (3, 2), True), ("w", (2, 3), False), ("kernel", (2, 3), False), ("weight", (3, 2), True)],
)
def test_a_matrix_in_a_plain_tree_has_the_layout_that_its_shape_shows(
    leaf: str, shape: tuple[int, ...], transposed: bool
) -> None:
    tensors, arrays = round_trip(nn.Linear(3, 2, bias=False), {leaf: shape})
    np.testing.assert_array_equal(arrays[leaf], tensors["weight"].T if transposed else tensors["weight"])


@pytest.mark.parametrize(("leaf", "transposed"), [("w", True), ("kernel", True), ("weight", False)])
def test_a_square_matrix_has_the_layout_that_its_name_says(leaf: str, transposed: bool) -> None:
    tensors, arrays = round_trip(nn.Linear(3, 3), {leaf: (3, 3), "b": (3,)})
    np.testing.assert_array_equal(arrays[leaf], tensors["weight"].T if transposed else tensors["weight"])
    tensors, arrays = round_trip(nn.Conv2d(3, 3, 3, bias=False), {leaf: (3, 3, 3, 3)})
    np.testing.assert_array_equal(
        arrays[leaf], tensors["weight"].transpose(2, 3, 1, 0) if transposed else tensors["weight"]
    )


def test_layers_of_equinox_and_haiku_have_twins() -> None:
    round_trip(nn.Conv2d(2, 5, 3), {"weight": (5, 2, 3, 3), "bias": (5, 1, 1)})
    round_trip(nn.Conv2d(2, 5, 3), {"w": (3, 3, 2, 5), "b": (5,)})
    round_trip(nn.BatchNorm2d(3), {"scale": (1, 1, 1, 3), "offset": (1, 1, 1, 3), "mean": (3,), "var": (3,)})
    round_trip(nn.Embedding(7, 2), {"embeddings": (7, 2)})
    parts = ("query", "key", "value", "linear")
    of_haiku = {f"{part}.{leaf}": shape for part in parts for leaf, shape in SQUARE.items()}
    tensors, arrays = round_trip(nn.MultiheadAttention(4, 2), of_haiku)
    np.testing.assert_array_equal(arrays["key.w"], tensors["in_proj_weight"][4:8].T)
    of_equinox = {f"{part}_proj.weight": (4, 4) for part in ("query", "key", "value", "output")}
    tensors, arrays = round_trip(nn.MultiheadAttention(4, 2, bias=False), of_equinox)
    np.testing.assert_array_equal(arrays["key_proj.weight"], tensors["in_proj_weight"][4:8])


def test_transposed_convolutions_of_equinox_and_haiku_are_reversed() -> None:
    """Both correlate where torch convolves; with Equinox 0.13.8 and Haiku 0.0.17 the check finds ports equal."""
    module = nn.ConvTranspose1d(2, 5, 3, bias=False)
    tensors, arrays = round_trip(module, {"weight": (5, 2, 3)})
    np.testing.assert_array_equal(arrays["weight"], tensors["weight"].transpose(1, 0, 2)[..., ::-1])
    tensors, arrays = round_trip(module, {"w": (3, 5, 2)})
    np.testing.assert_array_equal(arrays["w"], tensors["weight"].transpose(2, 1, 0)[::-1])


def test_a_square_transposed_convolution_is_equinoxs_unless_it_is_said() -> None:
    module = nn.Sequential(nn.ConvTranspose1d(3, 3, 2, bias=False))
    tensors, arrays = round_trip(module, {"0.weight": (3, 3, 2)})
    np.testing.assert_array_equal(arrays["0.weight"], tensors["0.weight"].transpose(1, 0, 2)[..., ::-1])
    tensors, arrays = round_trip(module, {"0.weight": (3, 3, 2)}, transpose_kernel=["0"])
    np.testing.assert_array_equal(arrays["0.weight"], tensors["0.weight"])


def test_a_parameter_that_only_looks_like_a_weight_stays_as_it_is() -> None:
    layer = nn.Linear(3, 3, bias=False)
    layer.register_parameter("lora_a", nn.Parameter(torch.arange(9.0).reshape(3, 3)))
    tensors, arrays = round_trip(layer, {"kernel": (3, 3), "lora_a": (3, 3)})
    np.testing.assert_array_equal(arrays["lora_a"], tensors["lora_a"])


@pytest.mark.parametrize(
    ("module", "leaf", "shapes", "expected", "order"),
    [
        (Conv1D, "kernel", [(8, 3), (3, 3)], (1, 0), "(out, in)"),  # Hugging Face's FlaxConv1D
        (Conv1D, "kernel", [(3, 8), (3, 3)], (0, 1), "(in, out)"),
        (linear, "w", [(8, 3), (3, 3)], (0, 1), "(out, in)"),
        (linear, "w", [(3, 8), (3, 3)], (1, 0), "(in, out)"),
        (linear, "weight", [(3, 8), (3, 3)], (1, 0), "(in, out)"),
        (convolution, "w", [(8, 3, 3), (3, 3, 3)], (0, 1, 2), "(out, in, ...)"),
        (transposed_convolution, "kernel", [(2, 8, 3), (2, 3, 3)], (2, 1, 0), "(..., out, in)"),
    ],
)
def test_a_square_array_has_the_order_of_the_other_layers_of_its_class(
    module: Any, leaf: str, shapes: list[tuple[int, ...]], expected: tuple[int, ...], order: str
) -> None:
    layers = nn.Sequential(module(8, 3), module(3, 3))
    arrays = {f"{n}.{leaf}": shape for n, shape in enumerate(shapes)} | {f"{n}.bias": (s,) for n, s in ((0, 8), (1, 3))}
    (piece,) = (piece for piece in Converter(layers, arrays).pieces if piece.order)
    assert (piece.jax, piece.order, piece.other_axes) == (f"1.{leaf}", order, ())
    tensors, arrays = round_trip(layers, arrays)
    np.testing.assert_array_equal(arrays[f"1.{leaf}"], tensors["1.weight"].transpose(expected))


def test_a_matrix_of_one_row_or_column_shows_no_order() -> None:
    """As the first and last layer of a network of one number: both orders of their axes are the same elements."""
    layers = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    biases = {"0.bias": (3,), "1.bias": (3,), "2.bias": (1,)}
    tensors, arrays = round_trip(layers, {f"{n}.kernel": s for n, s in enumerate([(1, 3), (3, 3), (3, 1)])} | biases)
    np.testing.assert_array_equal(arrays["1.kernel"], tensors["1.weight"].T)


@pytest.mark.parametrize(
    ("module", "leaf", "shape", "other"),
    [
        (Conv1D(3, 3), "kernel", (3, 3), (1, 0)),
        (linear(3, 3), "w", (3, 3), (0, 1)),
        (linear(3, 3), "weight", (3, 3), (1, 0)),
        (linear(3, 3), "kernel", (3, 3), ()),
        (nn.Embedding(3, 3), "kernel", (3, 3), (0, 1)),
        (nn.Embedding(3, 3), "embedding", (3, 3), ()),
    ],
)
def test_the_other_order_of_a_square_array_is_known_where_nothing_decides(
    module: nn.Module, leaf: str, shape: tuple[int, ...], other: tuple[int, ...]
) -> None:
    arrays = {leaf: shape} | ({"bias": (3,)} if hasattr(module, "bias") else {})
    (piece,) = (piece for piece in Converter(module, arrays).pieces if piece.jax == leaf)
    assert piece.other_axes == other
