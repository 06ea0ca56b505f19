"""Models of a known size: GPT-2 (124M parameters) and ResNet-50.

Their weights are zeros, since a plan needs only their shapes. Parameters are float32 and products bfloat16, as in most
runs on these GPUs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
from flax import nnx
from jax import numpy as jnp

from jaxddp.nn.layers import BatchNorm

GPT2_LAYERS, GPT2_WIDTH, GPT2_HEADS, GPT2_TOKENS = 12, 768, 12, 1024
GPT2_VOCABULARY = 50_304  # 50,257 tokens, padded to a multiple of 64 for tensor cores
RESNET50_BLOCKS, RESNET50_CLASSES, IMAGE = (3, 4, 6, 3), 1000, 224

_ZEROS = nnx.initializers.zeros
Attention = Literal["xla", "cudnn"] | None


def linear(in_features: int, out_features: int) -> nnx.Linear:
    """Make a linear layer with weights 0."""
    return nnx.Linear(in_features, out_features, kernel_init=_ZEROS, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))


class GPT2Block(nnx.Module):
    """Pre-norm attention and a multilayer perceptron of four times the width, each with a residual connection."""

    def __init__(self, width: int, heads: int, attention: Attention = None):
        self.heads, self.implementation = heads, attention
        self.ln_1, self.ln_2 = (nnx.LayerNorm(width, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)) for _ in range(2))
        self.attention, self.projection = linear(width, 3 * width), linear(width, width)
        self.fc, self.out = linear(width, 4 * width), linear(4 * width, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = jnp.split(self.attention(self.ln_1(x)).reshape(*x.shape[:2], self.heads, -1), 3, axis=-1)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.implementation)
        x += self.projection(mixed.reshape(x.shape))
        return x + self.out(jax.nn.gelu(self.fc(self.ln_2(x))))


class GPT2(nnx.Module):
    """Decoder whose logits share the matrix of its token embedding.

    Args:
        layers, width, heads, length, vocabulary: sizes, by default those of 124M parameters.
        attention: implementation of `jax.nn.dot_product_attention`; None: jax's default, "cudnn": fused on GPUs.

    Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
    """

    def __init__(
        self,
        layers: int = GPT2_LAYERS,
        width: int = GPT2_WIDTH,
        heads: int = GPT2_HEADS,
        length: int = GPT2_TOKENS,
        vocabulary: int = GPT2_VOCABULARY,
        attention: Attention = None,
    ) -> None:
        self.tokens, self.positions = (
            nnx.Embed(size, width, embedding_init=_ZEROS, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
            for size in (vocabulary, length)
        )
        self.blocks = nnx.List([GPT2Block(width, heads, attention) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


def conv(in_channels: int, channels: int, size: int, stride: int = 1) -> nnx.Conv:
    """Make a convolution with weights 0 and no bias."""
    return nnx.Conv(
        in_channels,
        channels,
        (size, size),
        strides=stride,
        padding=size // 2,
        use_bias=False,
        kernel_init=_ZEROS,
        dtype=jnp.bfloat16,
        rngs=nnx.Rngs(0),
    )


class Bottleneck(nnx.Module):
    """1x1, 3x3 and 1x1 convolutions with a residual connection; the 3x3 one has the stride."""

    def __init__(self, in_channels: int, channels: int, stride: int):
        sizes = [(in_channels, channels, 1, 1), (channels, channels, 3, stride), (channels, 4 * channels, 1, 1)]
        self.convs = nnx.List([conv(*size) for size in sizes])
        self.norms = nnx.List([BatchNorm(size[1]) for size in sizes])
        changes = stride != 1 or in_channels != 4 * channels
        self.shortcut = conv(in_channels, 4 * channels, 1, stride) if changes else None
        self.shortcut_norm = BatchNorm(4 * channels) if changes else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x
        for number, (convolution, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(convolution(y if number == 0 else jax.nn.relu(y)))
        if self.shortcut is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut(x))
        return jax.nn.relu(x + y)


class ResNet50(nnx.Module):
    """Residual network of 50 layers for images (B, H, W, 3).

    Source: He et al., Deep Residual Learning, 2015; the stride of a block is on its 3x3 convolution, as in torchvision.
    """

    def __init__(self, blocks: Sequence[int] = RESNET50_BLOCKS, classes: int = RESNET50_CLASSES):
        self.stem, self.stem_norm = conv(3, 64, 7, 2), BatchNorm(64)
        stages, channels = [], 64
        for number, count in enumerate(blocks):
            for block in range(count):
                stages.append(Bottleneck(channels, 64 * 2**number, 2 if number and not block else 1))
                channels = 256 * 2**number
        self.blocks = nnx.List(stages)
        self.fc = linear(channels, classes)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.stem_norm(self.stem(x.astype(jnp.bfloat16))))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for block in self.blocks:
            x = block(x)
        return self.fc(x.mean(axis=(1, 2)))


@dataclass(frozen=True)
class Preset:
    """A model, its batch per GPU, and the shapes of an example.

    Attributes:
        model: makes the model.
        batch_size: examples per GPU and step.
        example: arrays x and y of one example.
    """

    model: Callable[[], nnx.Module]
    batch_size: int
    example: Mapping[str, jax.ShapeDtypeStruct]


_TOKENS = jax.ShapeDtypeStruct((GPT2_TOKENS,), jnp.int32)
PRESETS = {
    "gpt2-124m": Preset(GPT2, 16, {"x": _TOKENS, "y": _TOKENS}),
    "resnet50": Preset(
        ResNet50,
        128,
        {"x": jax.ShapeDtypeStruct((IMAGE, IMAGE, 3), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)},
    ),
}
