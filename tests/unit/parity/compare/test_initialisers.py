"""Names of initialisers of torch and flax, from what they draw."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.nn import initializers

from jaxddp.parity.compare.initialisers import described, same_fans
from jaxddp.parity.initial_draws import DrawnTensor, _overlap


def of_torch(fill: Callable[[torch.Tensor], Any], shape: tuple[int, ...]) -> DrawnTensor:
    """Return draws of a tensor that a function of torch.nn.init fills."""
    torch.manual_seed(0)
    draws = [fill(torch.empty(shape)).numpy() for _ in range(8)]
    return DrawnTensor(shape, np.stack(draws).reshape(8, -1), np.array([*map(_overlap, draws)]))


def of_flax(initializer: Callable[..., Any], shape: tuple[int, int]) -> DrawnTensor:
    """Return draws of a kernel (in, out) of flax, as torch's weight."""
    draws = [np.asarray(initializer(jax.random.key(k), shape)).T for k in range(8)]
    return DrawnTensor(shape[::-1], np.stack(draws).reshape(8, -1), np.array([*map(_overlap, draws)]))


def linear(weight: DrawnTensor) -> dict[str, DrawnTensor]:
    """Return a layer with this weight."""
    return {"fc.weight": weight}


@pytest.mark.parametrize("shape", [(10, 20), (60, 30), (8, 4, 3, 3)], ids=str)
@pytest.mark.parametrize(
    ("fill", "name", "flax"),
    [
        (lambda x: torch.nn.init.kaiming_uniform_(x, a=5**0.5), "kaiming_uniform(a=sqrt(5))", "(1/3, "),
        (torch.nn.init.xavier_uniform_, "xavier_uniform", "glorot_uniform()"),
        (torch.nn.init.xavier_normal_, "xavier_normal", 'variance_scaling(1, "fan_avg", "normal")'),
        (torch.nn.init.kaiming_normal_, "kaiming_normal", 'variance_scaling(2, "fan_in", "normal")'),
        (torch.nn.init.orthogonal_, "orthogonal", "orthogonal()"),
        (torch.nn.init.zeros_, "zeros", "zeros"),
        (lambda x: torch.nn.init.constant_(x, 0.3), "constant(0.3)", "constant(0.3)"),
        (lambda x: torch.nn.init.trunc_normal_(x, std=0.02), "normal(0.02)", "normal(0.02)"),
    ],
)
def test_torch_names(
    fill: Callable[[torch.Tensor], torch.Tensor], name: str, flax: str, shape: tuple[int, ...]
) -> None:
    layer = described("torch", "fc.weight", linear(of_torch(fill, shape)))
    assert layer.says.partition(", deviation")[0] == name and flax in layer.flax


@pytest.mark.parametrize(
    ("initializer", "name"),
    [
        (initializers.lecun_normal(), "lecun_normal"),
        (initializers.he_normal(), "he_normal"),
        (initializers.glorot_normal(), "glorot_normal"),
        (initializers.glorot_uniform(), "glorot_uniform"),
        (initializers.he_uniform(), "he_uniform"),
        (initializers.orthogonal(1.5), "orthogonal(1.5)"),
        (initializers.normal(5.0), "normal(5)"),
        (initializers.truncated_normal(0.02), "truncated_normal(0.02)"),
        (initializers.ones, "ones"),
    ],
)
def test_flax_names(initializer: Callable[..., Any], name: str) -> None:
    layer = described("jax", "fc.weight", linear(of_flax(initializer, (30, 60))))
    assert layer.says.partition(", deviation")[0] == name


def test_few_numbers_have_no_name() -> None:
    assert described("jax", "fc.weight", linear(of_flax(initializers.normal(1.3), (2, 2)))).family == "drawn"
    assert described("jax", "fc.weight", linear(of_flax(initializers.uniform(0.4), (20, 20)))).says.startswith(
        "uniform, mean 0.2"
    )


def test_the_bias_of_a_layer_of_torch_has_its_rule() -> None:
    layer = linear(of_torch(lambda x: torch.nn.init.kaiming_uniform_(x, a=5**0.5), (3, 6)))
    bound = 6**-0.5
    layer["fc.bias"] = of_torch(lambda x: torch.nn.init.uniform_(x, -bound, bound), (3,))
    assert described("torch", "fc.bias", layer).family == "uniform within 1/sqrt(fan_in)"
    layer["fc.bias"] = of_torch(lambda x: torch.nn.init.uniform_(x, -2 * bound, 2 * bound), (3,))
    assert described("torch", "fc.bias", layer).family != "uniform within 1/sqrt(fan_in)"


@pytest.mark.parametrize(
    ("shape", "own", "same"),
    [
        ((10, 20), (20, 10), True),
        ((10, 20), (10, 20), False),
        ((10, 20), (20, 2, 5), False),
        ((10, 20), (), False),
        ((8, 4, 3, 5), (3, 5, 4, 8), True),
        ((4, 8, 3, 3), (3, 3, 4, 8), False),
        ((10,), (10,), False),
    ],
    ids=["linear", "torch's layout", "heads", "fused", "convolution", "transposed convolution", "bias"],
)
def test_an_initialiser_of_flax_would_do_only_for_an_array_of_the_same_fans(
    shape: tuple[int, ...], own: tuple[int, ...], same: bool
) -> None:
    assert same_fans(shape, own) == same


def test_a_deviation_that_fits_several_initialisers_is_told_as_it_is() -> None:
    draws = np.random.default_rng(0).normal(size=(8, 40)) / np.sqrt(5)  # over the inputs, and not their mean with 8
    tensor = DrawnTensor((8, 5), draws, np.ones(8))
    assert described("jax", "fc.weight", linear(tensor)).says == "normal(0.5)"
