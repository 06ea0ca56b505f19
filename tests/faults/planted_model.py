"""Faults of the model, of its loss, and of its numerical precision."""

from functools import partial
from typing import Any

import jax
import optax
from flax import nnx
from jax import lax
from jax import numpy as jnp

from jaxddp.nn.layers import BatchNorm
from tests.support.layers import Conv, Linear

from . import policy, resnet
from .models_flax import convnet_loss, gelu, token_losses, tokens_global_loss
from .planted_edits import Edit, Planted, model, on
from .planted_reduction import loss_is

tanh_gelu = nnx.gelu  # jax's default


class RoundedStatistics(BatchNorm):
    """BatchNorm with variance E[x^2] - E[x]^2, both in float32 as in jax."""

    def _batch_statistics(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        axes = tuple(range(x.ndim - 1))
        mean, of_squares = (value.mean(axes).astype(jnp.float32).astype(x.dtype) for value in (x, x * x))
        var, count = of_squares - mean * mean, x.size // x.shape[-1]
        self._track(lax.stop_gradient(mean), lax.stop_gradient(var * count / (count - 1)), self._count(x))
        return mean, var


class FrozenStatistics(BatchNorm):
    """BatchNorm that normalises by its running statistics, and never updates them, in training."""

    def _batch_statistics(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.mean[...], self.var[...]


class UnusedStatistics(BatchNorm):
    """BatchNorm that normalises by its running statistics before it updates them, in training."""

    def _batch_statistics(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        before = self.mean[...], self.var[...]
        super()._batch_statistics(x)
        return before


def flax_norm(features: int, **options: Any) -> nnx.BatchNorm:
    """Build jax's BatchNorm with torch's options where jax has them."""
    return nnx.BatchNorm(features, momentum=0.9, use_fast_variance=False, rngs=nnx.Rngs(0), **options)


def width_first(x: jax.Array) -> jax.Array:
    """Flatten images with height and width swapped."""
    return x.transpose(0, 3, 2, 1).reshape(len(x), -1)


def swapped_channels(layer: nnx.Conv, x: jax.Array) -> jax.Array:
    """Apply a convolution whose kernel was copied as (H, W, out, in)."""
    layer.kernel[...] = layer.kernel[...].transpose(0, 1, 3, 2)
    return layer(x)


def flipped_kernel(layer: nnx.Conv, x: jax.Array) -> jax.Array:
    """Convolve with the flipped kernel, where torch and jax correlate."""
    layer.kernel[...] = layer.kernel[...][::-1, ::-1]
    return layer(x)


def transposed_kernel(layer: nnx.Linear, x: jax.Array) -> jax.Array:
    """Apply a linear layer whose square kernel was copied as (out, in)."""
    return x @ layer.kernel[...].T + layer.bias[...][None]


def without_weights(jax_model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Give ignored labels a loss of 0, but count them."""
    values, counts = tokens_global_loss(jax_model, batch)
    return values, jnp.ones_like(counts)


def mean_of_all(jax_model: Any, batch: Any) -> jax.Array:
    """Average over all positions, including ignored labels."""
    values, _ = token_losses(jax_model(batch["x"]), batch["y"])
    return values.mean()


def with_rounded_inputs(product: Any, bits: int) -> Any:
    """Return a product that rounds its inputs to so many bits of mantissa, forward and backward."""

    def narrow(x: jax.Array) -> jax.Array:
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=bits)

    def rounded(a: jax.Array, b: jax.Array, *args: Any, **options: Any) -> jax.Array:
        plain = partial(_call, product, args, options)

        @jax.custom_vjp
        def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
            return plain(narrow(a), narrow(b))

        def forward(a: jax.Array, b: jax.Array) -> tuple[jax.Array, Any]:
            a, b = narrow(a), narrow(b)
            return plain(a, b), (a, b)

        def backward(inputs: Any, cotangent: jax.Array) -> Any:
            return jax.vjp(plain, *inputs)[1](narrow(cotangent))

        multiply.defvjp(forward, backward)
        return multiply(a, b)

    return rounded


def _call(product: Any, args: Any, options: Any, a: jax.Array, b: jax.Array) -> jax.Array:
    return product(a, b, *args, **options)


def reduced_precision(bits: int) -> Edit:
    """Round the inputs of all matrix products and convolutions."""
    linear = partial(Linear, dot_general=with_rounded_inputs(lax.dot_general, bits))
    conv = partial(Conv, conv_general_dilated=with_rounded_inputs(lax.conv_general_dilated, bits))

    def edit(right: Any) -> Any:
        layers = {"linear": linear} if right.scenario.setting.family == "mlp" else {"linear": linear, "conv": conv}
        return model(**layers)(right)

    return edit


def policy_loss(**options: Any) -> Edit:
    """Change PPO's loss."""
    return loss_is(partial(policy.jax_loss, **options))


def integer_labels(jax_model: Any, batch: Any) -> jax.Array:
    """Compute the cross entropy without label smoothing, as most examples do."""
    return optax.softmax_cross_entropy_with_integer_labels(jax_model(batch["x"]), batch["y"]).mean()


NO_CLIPPING = {"clamp_missing": "without the clamp both terms are equal, and either is the larger"}
CONVNET, POLICY, RESNET = on("convnet"), on("policy"), on("resnet")
STATISTICS = CONVNET + on("convnet_accumulated")
TF32, BFLOAT16 = 10, 7  # bits of mantissa

PLANTED: dict[str, Planted] = {
    "batch_norm_momentum": Planted(model(norm=partial(BatchNorm, momentum=0.9)), STATISTICS, "buffers"),
    "batch_norm_momentum/default": Planted(model(norm=partial(BatchNorm, momentum=0.01)), STATISTICS, "buffers"),
    "biased_variance": Planted(model(norm=flax_norm), STATISTICS, "buffers"),
    "batch_norm_eval": Planted(model(norm=FrozenStatistics), STATISTICS, "local_loss"),
    "batch_norm_eval/updating": Planted(model(norm=UnusedStatistics), STATISTICS, "local_loss"),
    "batch_norm_sync": Planted(model(norm=partial(BatchNorm, sync=True)), CONVNET, "local_loss"),
    "fast_variance": Planted(model(norm=RoundedStatistics), CONVNET, "local_loss"),
    "gelu_approximation": Planted(model(activations=(tanh_gelu,) * 2), on("mlp"), "local_loss"),
    "gelu_approximation/one_site": Planted(model(activations=(gelu, tanh_gelu)), on("mlp"), "local_loss"),
    "gelu_approximation/convnet": Planted(model(activations=(tanh_gelu,) * 3), CONVNET, "local_loss"),
    "gelu_approximation/block": Planted(model(activations=(gelu, tanh_gelu, gelu)), CONVNET, "local_loss"),
    "gelu_approximation/tokens": Planted(model(activation=tanh_gelu), on("tokens") + on("tokens_global"), "local_loss"),
    "norm_epsilon": Planted(
        model(norm=partial(nnx.LayerNorm, use_fast_variance=False)), on("tokens") + on("tokens_global"), "local_loss"
    ),
    "norm_epsilon/larger": Planted(
        model(norm=partial(nnx.LayerNorm, epsilon=1e-3, use_fast_variance=False)), on("tokens"), "local_loss"
    ),
    "norm_epsilon/batch_norm": Planted(model(norm=partial(BatchNorm, eps=1e-3)), CONVNET, "local_loss"),
    "same_padding": Planted(model(padding="SAME"), CONVNET, "local_loss"),
    "label_smoothing": Planted(loss_is(integer_labels), CONVNET, "local_loss"),
    "label_smoothing/other": Planted(loss_is(partial(convnet_loss, smoothing=0.05)), CONVNET, "local_loss"),
    "dropout_rate": Planted(model(rate=0.5), on("mlp_dropout"), "local_loss"),
    "dropout_rate/smaller": Planted(model(rate=0.1), on("mlp_dropout"), "local_loss"),
    "ignore_index": Planted(loss_is(mean_of_all), on("tokens") + on("tokens", world_size=4), "local_loss"),
    "ignore_index/weights": Planted(loss_is(without_weights), on("tokens_global"), "local_loss"),
    "padding_idx": Planted(
        model(look_up=lambda table, x: table[x]),
        on("tokens") + on("tokens_global") + on("tokens", world_size=4),
        "local_gradients",
    ),
    "layout": Planted(model(flatten=lambda x: x.reshape(len(x), -1)), CONVNET, "local_loss"),
    "layout/width_first": Planted(model(flatten=width_first), CONVNET, "local_loss"),
    "layout/channels": Planted(model(block=swapped_channels), CONVNET, "local_loss"),
    "layout/flipped": Planted(model(block=flipped_kernel), CONVNET, "local_loss"),
    "layout/linear": Planted(model(hidden=transposed_kernel), on("mlp"), "local_loss"),
    "reduced_precision_matmul": Planted(reduced_precision(TF32), on("mlp") + on("convnet"), "local_loss"),
    "reduced_precision_matmul/bfloat16": Planted(reduced_precision(BFLOAT16), on("mlp") + on("convnet"), "local_loss"),
    "same_padding/deep": Planted(model(same=resnet.PADDED), RESNET, "local_loss"),
    "same_padding/stages": Planted(model(same=("layer2", "layer3", "layer4")), RESNET, "local_loss"),
    "same_padding/all_but_stem": Planted(model(same=resnet.PADDED[1:]), RESNET, "local_loss"),
    "same_padding/two_stages": Planted(model(same=("layer2", "layer4")), RESNET, "local_loss"),
    "biased_variance/deep": Planted(model(norm=flax_norm), RESNET, "buffers"),
    "std_correction": Planted(policy_loss(ddof=0), POLICY, "local_loss"),
    "std_correction/added": Planted(model(ddof=1), POLICY, "local_loss"),
    "clipped_term": Planted(
        policy_loss(of_values=lambda unclipped, clipped: unclipped), POLICY, "local_loss", NO_CLIPPING
    ),
    "clipped_term/always": Planted(policy_loss(of_values=lambda unclipped, clipped: clipped), POLICY, "local_loss"),
    "clipped_term/smaller": Planted(policy_loss(of_policy=jnp.minimum), POLICY, "local_loss"),
    "clamp_missing": Planted(model(clamp=lambda x: x), POLICY, "local_loss"),
    "clamp_missing/below": Planted(model(clamp=partial(jnp.minimum, policy.FARTHEST)), POLICY, "local_loss"),
    "clamp_missing/above": Planted(policy_loss(widths=(policy.CLIP, jnp.inf)), POLICY, "local_loss"),
}
