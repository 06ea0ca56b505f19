r"""A Vision Transformer (Dosovitskiy et al. 2020) in Flax and in PyTorch, with timm's names.

Without a class token: the mean over the patches is classified, as in Beyer et al. 2022.

    jaxddp train examples/vit.py      # 17 s on two cores; accuracy 0.93 on the digits held out
    python -m torch_ref.train examples/vit.py   # 8 s, and the same losses

ViT-Ti on a folder of images on the 8 GPUs of a node (or `torchrun --nproc-per-node 8 -m torch_ref.train`):

    jaxddp train examples/vit.py --data imagenet --size 224 --patch 16 --width 192 --depth 12 --heads 3 \
        --classes 1000 --global-batch-size 1024 --epochs 300 --warmup-steps 10000 --data-workers 8 --amp bf16
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import optax
import torch
from flax import nnx
from jax import Array
from jax import numpy as jnp
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from jaxddp import TrainConfig, layers
from jaxddp.data import digits
from jaxddp.data.sources import image_folder
from jaxddp.data.torch_rng import Generator

epochs, global_batch_size, clip_grad_norm, warmup_steps = 10, 32, 1.0, 50
optimizer, lr, weight_decay, schedule = "adamw", 2e-3, 0.05, "warmup_cosine"


@dataclass
class Options:
    data: str | None = None
    """Folder of train and val, each with a folder of images for each class. None: 1,797 handwritten digits."""
    size: int = 8
    patch: int = 2
    width: int = 64
    depth: int = 4
    heads: int = 4
    classes: int = 10


class Images:  # a source is anything with a length and items
    def __init__(self, folder: str, size: int):
        self.images, self.size = image_folder(folder), size

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self.images[index].values()
        return {"image": np.asarray(Image.fromarray(image).resize((self.size, self.size))), "label": label}


def examples(options: Options, part: str) -> Any:
    if options.data is not None:
        return Images(f"{options.data}/{part}", options.size)
    images, labels = digits().values()
    chosen = (np.arange(len(labels)) % 6 == 0) == (part == "val")
    pixels = np.repeat(images[chosen].reshape(-1, 8, 8, 1) * 240, 3, axis=-1)
    return {"image": pixels.astype(np.uint8), "label": labels[chosen].astype(np.int32)}


def predict(model: Any, batch: dict[str, Any]) -> Any:
    return model(batch["image"])


def metrics(logits: Any, batch: dict[str, Any]) -> dict[str, Any]:
    return {"accuracy": logits.argmax(-1) == batch["label"]}


class TorchBlock(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, (self.norm1, self.norm2) = heads, (nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, 4 * width), "fc2": nn.Linear(4 * width, width)})

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
        x = x + self.attn["proj"](mixed.transpose(1, 2).flatten(2))
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))


class TorchViT(nn.Module):
    def __init__(self, options: Options):
        super().__init__()
        width, patches = options.width, (options.size // options.patch) ** 2
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, options.patch, options.patch)})
        self.pos_embed = nn.Parameter(torch.zeros(1, patches, width))
        self.blocks = nn.Sequential(*(TorchBlock(width, options.heads) for _ in range(options.depth)))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, options.classes)

    def forward(self, image: Tensor) -> Tensor:
        pixels = image.movedim(-1, 1).to(self.pos_embed.dtype) / 64 - 2
        x = self.patch_embed["proj"](pixels).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x + self.pos_embed)).mean(1))


def torch_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["image"]), batch["label"].long(), reduction="none")


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, generator: Generator):
        norm = partial(nnx.LayerNorm, width, use_fast_variance=False, rngs=nnx.Rngs(0))
        linear = partial(layers.Linear, generator=generator)
        self.heads, self.norm1, self.norm2 = heads, norm(), norm()
        self.attn = nnx.Dict(qkv=linear(width, 3 * width), proj=linear(width, width))
        self.mlp = nnx.Dict(fc1=linear(width, 4 * width), fc2=linear(4 * width, width))

    def __call__(self, x: Array) -> Array:
        qkv = self.attn.qkv(self.norm1(x)).reshape(*x.shape[:2], 3, self.heads, -1)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        x = x + self.attn.proj(jnp.einsum("bhqk,bkhd->bqhd", nnx.softmax(scores), v).reshape(x.shape))
        return x + self.mlp.fc2(nnx.gelu(self.mlp.fc1(self.norm2(x)), approximate=False))


class ViT(nnx.Module):
    def __init__(self, options: Options, config: TrainConfig):
        width, patch, patches = options.width, options.patch, (options.size // options.patch) ** 2
        generator = Generator(config.seed)
        self.patch_embed = nnx.Dict(proj=layers.Conv(3, width, (patch, patch), stride=patch, generator=generator))
        self.pos_embed = nnx.Param(jnp.zeros((1, patches, width)))
        self.blocks = nnx.List([Block(width, options.heads, generator) for _ in range(options.depth)])
        self.norm = nnx.LayerNorm(width, use_fast_variance=False, rngs=nnx.Rngs(0))
        self.head = layers.Linear(width, options.classes, generator=generator)

    def __call__(self, image: Array) -> Array:
        x = self.patch_embed.proj(image.astype(self.pos_embed.dtype) / 64 - 2)
        x = x.reshape(len(x), -1, x.shape[-1]) + self.pos_embed[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def jax_loss(model: nnx.Module, batch: dict[str, Array]) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"])


train_data, test_data = partial(examples, part="train"), partial(examples, part="val")
torch_model, jax_model = TorchViT, ViT
