"""Layers and models against torch: initial weights, outputs, gradients, running statistics."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from jax import numpy as jnp

from jaxddp import models
from jaxddp.data.torch_rng import Generator
from jaxddp.distributed.replicas import Replicas
from jaxddp.nn import layers
from jaxddp.nn.functional import Functional
from jaxddp.nn.torch_weights import from_torch, to_torch
from jaxddp.state import Params
from torch_ref import models as torch_models

# Largest distances in float64, relative to an array's largest value, with the measured ones beside them.
TOLERANCE = 2e-14  # 1.3e-15
FLOAT32_TOLERANCE = 1e-6  # 6.8e-8
LARGE_MEAN_TOLERANCE = 1e-5  # float32, x around 100: 1.4e-6; with E[x^2] - E[x]^2: 5.7e-4
FAULT = 1e-2  # smallest distance with a planted fault: 0.022 (the biased variance)
EMBEDDING_ULPS = 4  # of initial N(0, 1) weights: 1; all other initial weights equal torch's bit for bit
# Without vector instructions torch rounds random numbers differently.
VECTORISED = "AVX" in torch.backends.cpu.get_cpu_capability()
SCALAR_TOLERANCE = 4e-6  # of initial weights without vector instructions: N(0, 1) 1.8e-6, uniform 6e-8

Arrays = dict[str, np.ndarray]


def test_layers_with_given_weights_draw_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key takes five compiled programs, a quarter of a second of the first start."""
    monkeypatch.delattr(jax.random, "key")
    layers.Linear(3, 2, generator=Generator(0))
    layers.Conv(3, 2, (3, 3), generator=Generator(0))
    layers.Embed(3, 2, generator=Generator(0))
    with pytest.raises(AttributeError, match="key"):
        nnx.Linear(3, 2, rngs=nnx.Rngs(0))


def distance(a: Any, b: Any) -> float:
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    return float(np.max(np.abs(a - b)) / (1e-300 + np.max(np.abs(b))))


def normal(*shape: int, seed: int = 0, mean: float = 0.0, scale: float = 1.0) -> np.ndarray:
    return mean + scale * np.random.default_rng(seed).normal(size=shape)


def tensor(x: np.ndarray, **options: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(x), dtype=torch.float64, **options)


def channels_first(x: Any) -> Any:
    return np.moveaxis(np.asarray(x), -1, 1)


def in_mode(module: nnx.Module, train: bool) -> Functional:
    module.train() if train else module.eval()
    return Functional(module)


# ---- BatchNorm


def run_jax(functional: Functional, buffers: Params, x: jax.Array, cotangent: jax.Array) -> dict[str, jax.Array]:
    """Compute output, gradients of sum(output * cotangent), and new statistics."""

    def loss(params: Params, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Params]]:
        module = functional.module(params, buffers)
        y = module(x)
        return (y * cotangent).sum(), (y, Functional(module).buffers)

    (d_params, d_x), (y, new_buffers) = jax.grad(loss, argnums=(0, 1), has_aux=True)(functional.params, x)
    return {"y": y, "d_x": d_x, "d_scale": d_params["scale"], "d_bias": d_params["bias"], **new_buffers}


def run_torch(bn: torch.nn.Module, x: np.ndarray, cotangent: np.ndarray) -> Arrays:
    bn.zero_grad()
    inputs = tensor(channels_first(x), requires_grad=True)
    y = bn(inputs)
    (y * tensor(channels_first(cotangent))).sum().backward()
    tensors = {"y": y, "d_x": inputs.grad, "mean": bn.running_mean, "var": bn.running_var}
    arrays = {name: value.detach().numpy().copy() for name, value in tensors.items()}
    arrays |= {"d_scale": bn.weight.grad.numpy().copy(), "d_bias": bn.bias.grad.numpy().copy()}
    return arrays | {name: np.moveaxis(arrays[name], 1, -1) for name in ("y", "d_x")}


@pytest.mark.parametrize(
    ("shape", "twin"), [((6, 5), torch.nn.BatchNorm1d), ((2, 3, 4, 5), torch.nn.BatchNorm2d)], ids=["1d", "2d"]
)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_batch_norm_equals_torch_over_several_steps(shape: tuple[int, ...], twin: Callable, training: bool) -> None:
    with jax.enable_x64(True):
        bn, reference = layers.BatchNorm(5, eps=1e-3, momentum=0.3), twin(5, eps=1e-3, momentum=0.3).double()
        scale, bias = normal(5, seed=1), normal(5, seed=2)
        bn.scale[...], bn.bias[...] = jnp.asarray(scale), jnp.asarray(bias)
        reference.load_state_dict({"weight": tensor(scale), "bias": tensor(bias)}, strict=False)
        in_eval, in_training = in_mode(bn, False), in_mode(bn, True)
        run, buffers = jax.jit(run_jax, static_argnums=0), in_eval.buffers
        for step in range(4):
            batch, cotangent = normal(*shape, seed=step, mean=step, scale=2.0), normal(*shape, seed=9)
            train = training or step < 2  # eval: after two training steps, with their running statistics
            actual = run(in_training if train else in_eval, buffers, batch, cotangent)
            buffers = {name: actual[name] for name in buffers}
            expected = run_torch(reference.train(train), batch, cotangent)
            for name, value in expected.items():
                assert distance(actual[name], value) < TOLERANCE, (name, step)
        count = int(buffers["num_batches_tracked"])
        assert count == int(reference.num_batches_tracked) == (4 if training else 2)


def test_jax_batch_norm_tracks_another_variance() -> None:
    """Flax tracks the biased variance, torch the unbiased one."""
    x = jnp.asarray(normal(6, 5), "float32")
    bn, flax_bn = layers.BatchNorm(5), nnx.BatchNorm(5, momentum=0.9, rngs=nnx.Rngs(0))
    assert distance(flax_bn(x), bn(x)) < FLOAT32_TOLERANCE
    assert distance(flax_bn.mean[...], bn.mean[...]) < FLOAT32_TOLERANCE
    assert distance(flax_bn.var[...], bn.var[...]) > FAULT


def test_batch_norm_keeps_its_digits_with_a_large_mean() -> None:
    """In float32, with a mean of 100, the fast variance E[x^2] - E[x]^2 loses four digits."""
    x = normal(64, 5, mean=100.0).astype("float32")
    exact = x.astype("float64")
    right = (exact - exact.mean(0)) / np.sqrt(exact.var(0) + 1e-5)
    fast = jnp.mean(jnp.square(x), 0) - jnp.square(jnp.mean(x, 0))
    planted = (x - jnp.mean(x, 0, keepdims=True)) / jnp.sqrt(fast + 1e-5).reshape(1, -1)
    assert distance(layers.BatchNorm(5)(jnp.asarray(x)), right) < LARGE_MEAN_TOLERANCE
    assert distance(planted, right) > 10 * LARGE_MEAN_TOLERANCE


def test_batch_norm_refuses_one_value_per_channel_in_training_only() -> None:
    bn = layers.BatchNorm(3)
    with pytest.raises(ValueError, match=r"more than one value per channel in training, got input \(1, 3\)"):
        bn(jnp.ones((1, 3)))
    bn.eval()
    assert bn(jnp.ones((1, 3))).shape == (1, 3)


@pytest.mark.parametrize("sync", [True, False])
def test_sync_batch_norm_equals_torch_on_the_whole_batch(sync: bool) -> None:
    """Forward and backward, with two examples per replica; without sync, every output differs."""
    world_size, x, cotangent = 4, normal(8, 5, scale=2.0), normal(8, 5, seed=1)
    replicas = Replicas(jax.devices()[:world_size])
    with jax.enable_x64(True):
        functional = Functional(layers.BatchNorm(5, sync=sync))
        mapped = replicas.map(lambda x, c: run_jax(functional, functional.buffers, x, c), (0, 0), 0)
        per_replica = jax.device_get(mapped(*(part.reshape(world_size, 2, 5) for part in (x, cotangent))))
    expected = run_torch(torch.nn.BatchNorm1d(5).double(), x, cotangent)
    actual = {name: per_replica[name].reshape(8, 5) for name in ("y", "d_x")}
    actual |= {name: per_replica[name][0] for name in ("mean", "var")}
    actual |= {"d_scale": per_replica["d_scale"].sum(axis=0)}
    off = [distance(value, expected[name]) for name, value in actual.items()]
    assert max(off) < TOLERANCE if sync else min(off) > FAULT


# ---- layers with weights


def twin_of(build: Callable[[], torch.nn.Module], seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return build()


def check_initial_weights(module: nnx.Module, twin: torch.nn.Module) -> None:
    functional = Functional(module)
    actual, expected = to_torch({**functional.params, **functional.buffers}), twin.state_dict()
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        check_drawn(value, expected[name].numpy(), EMBEDDING_ULPS if name.startswith("embedding.") else 0)


def check_drawn(value: np.ndarray, expected: np.ndarray, ulps: int) -> None:
    if VECTORISED:
        np.testing.assert_array_max_ulp(value, expected, ulps)
    else:
        np.testing.assert_allclose(value, expected, rtol=0, atol=SCALAR_TOLERANCE)


def output_with_weights_of(module: nnx.Module, twin: torch.nn.Module, x: np.ndarray) -> np.ndarray:
    twin.load_state_dict({name: tensor(value) for name, value in to_torch(Functional(module).params).items()})
    return twin.double()(tensor(x)).detach().numpy()


CONVOLUTIONS: list[dict[str, Any]] = [
    {"kernel_size": (3, 3), "padding": 1},
    {"kernel_size": (3, 2), "stride": 2, "padding": 1, "groups": 2},
    {"kernel_size": (5,), "stride": 3, "bias": False},
]


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=["3x3", "strided and grouped", "1d"])
def test_conv_equals_torch(options: dict[str, Any]) -> None:
    module = layers.Conv(4, 6, **options, generator=Generator(3))
    kind = {1: torch.nn.Conv1d, 2: torch.nn.Conv2d}[len(options["kernel_size"])]
    twin = twin_of(lambda: kind(4, 6, **options), seed=3)
    check_initial_weights(module, twin)
    x = normal(2, *(7,) * len(options["kernel_size"]), 4)
    expected = output_with_weights_of(module, twin, channels_first(x))
    with jax.enable_x64(True):
        actual = channels_first(module(jnp.asarray(x)))
        module.kernel[...] = module.kernel[...][::-1]  # a convolution instead of a cross-correlation
        planted = channels_first(module(jnp.asarray(x)))
    assert distance(actual, expected) < TOLERANCE
    assert distance(planted, expected) > FAULT


@pytest.mark.parametrize("bias", [True, False])
def test_linear_equals_torch(bias: bool) -> None:
    module = layers.Linear(3, 4, bias=bias, generator=Generator(5))
    twin = twin_of(lambda: torch.nn.Linear(3, 4, bias=bias), seed=5)
    check_initial_weights(module, twin)
    with jax.enable_x64(True):
        actual = module(jnp.asarray(normal(6, 3)))
    assert distance(actual, output_with_weights_of(module, twin, normal(6, 3))) < TOLERANCE


def test_embed_equals_torch() -> None:
    module, ids = layers.Embed(7, 5, generator=Generator(5)), np.array([[0, 6], [3, 3]])
    twin = twin_of(lambda: torch.nn.Embedding(7, 5), seed=5)
    table = np.asarray(module.embedding[...])
    check_drawn(table, twin.weight.detach().numpy(), EMBEDDING_ULPS)
    np.testing.assert_array_equal(module(ids), table[ids])


# ---- models

MODELS: dict[str, tuple[dict[str, Any], np.ndarray]] = {
    "Linear": ({"in_features": 6, "num_classes": 3}, normal(5, 2, 3)),
    "MLP": ({"in_features": 6, "hidden_sizes": (8, 4), "num_classes": 3}, normal(5, 2, 3)),
    "CharMLP": (
        {"vocab_size": 9, "context_length": 3, "embedding_size": 4, "hidden_size": 6},
        np.random.default_rng(0).integers(0, 9, (5, 3)),
    ),
    "ConvNet": ({"in_channels": 1, "channels": (3, 4), "num_classes": 3}, normal(2, 7, 6)),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_equal_their_torch_twins(name: str) -> None:
    sizes, x = MODELS[name]
    twin = twin_of(lambda: getattr(torch_models, name)(**sizes), seed=1)
    module = getattr(models, name)(**sizes, generator=Generator(1))
    check_initial_weights(module, twin)
    with pytest.raises(AssertionError):
        check_initial_weights(getattr(models, name)(**sizes, generator=Generator(2)), twin)
    with jax.enable_x64(True):
        functional = Functional(module)
        tensors = {name: value.numpy() for name, value in twin.double().state_dict().items()}
        like = ({n: v.astype("float64") for n, v in part.items()} for part in (functional.params, functional.buffers))
        params, buffers = from_torch(tensors, *like)
        for train in (True, False):  # eval uses the running statistics of the training pass
            actual, buffers = forward(in_mode(module, train), params, buffers, x)
            inputs = tensor(x) if x.dtype.kind == "f" else torch.tensor(x)
            assert distance(actual, twin.train(train)(inputs).detach().numpy()) < TOLERANCE


@functools.partial(jax.jit, static_argnums=0)
def forward(functional: Functional, params: Params, buffers: Params, x: jax.Array) -> tuple[jax.Array, Params]:
    module = functional.module(params, buffers)
    logits = module(x)
    return logits, Functional(module).buffers
