r"""GPT-2 (Radford et al. 2019) on files of tokens, in Flax and in PyTorch, with Hugging Face's names.

    jaxddp train examples/gpt2.py --output runs/jax        # 27 s on two cores
    python -m torch_ref.train examples/gpt2.py --output runs/torch   # 20 s; test loss 2.047953, as in JAX (torch 2.13)

GPT-2's 124 million parameters on the 8 GPUs of a node (or `torchrun --nproc-per-node 8 -m torch_ref.train`):

    jaxddp train examples/gpt2.py --tokens openwebtext --layers 12 --heads 12 --width 768 --context 1024 \
        --vocab 50257 --global-batch-size 480 --accumulation-steps 5 --amp bf16 --lr 6e-4 --min-lr 6e-5 \
        --warmup-steps 2000 --epochs 1 --output runs/gpt2

Hugging Face's weights: `python examples/gpt2.py model.safetensors gpt2.safetensors`, and `--weights gpt2.safetensors`.
"""

import sys
from dataclasses import dataclass
from functools import partial

import numpy as np
import optax
from flax import nnx
from jax import numpy as jnp
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from jaxddp import TrainConfig, layers
from jaxddp.data.sources import token_file
from jaxddp.data.torch_rng import Generator

epochs, global_batch_size, clip_grad_norm, schedule, warmup_steps = 6, 32, 1.0, "warmup_cosine", 50
optimizer, lr, min_lr, betas, weight_decay = "adamw", 3e-3, 3e-4, (0.9, 0.95), 0.1
norm = partial(nnx.LayerNorm, epsilon=1e-5, use_fast_variance=False, rngs=nnx.Rngs(0))  # as torch's


@dataclass
class Options:
    tokens: str | None = None  # folder of train.bin and val.bin, as nanoGPT writes them; None: source files of torch
    layers: int = 2
    heads: int = 4
    width: int = 64
    context: int = 64
    vocab: int = 256

    def windows(self, part: str):  # type: ignore[no-untyped-def]
        path = f"{self.tokens}/{part}.bin" if self.tokens else {"train": nn.functional, "val": nn.init}[part].__file__
        return token_file(path, self.context, dtype="uint16" if self.tokens else "uint8")

    def tables(self) -> list[np.ndarray]:  # initial embeddings; the layers have torch's initial weights
        rng = np.random.default_rng(0)
        return [rng.normal(0, 0.02, (size, self.width)).astype(np.float32) for size in (self.vocab, self.context)]


class TorchBlock(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.ln_1, self.ln_2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.attn["c_attn"](self.ln_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.attn["c_proj"](mixed.transpose(1, 2).flatten(2))
        return x + self.mlp["c_proj"](nn.functional.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class TorchGPT2(nn.Module):
    def __init__(self, options: Options):
        super().__init__()
        self.wte, self.wpe = (nn.Embedding.from_pretrained(Tensor(x), False) for x in options.tables())
        self.h = nn.Sequential(*(TorchBlock(options.width, options.heads) for _ in range(options.layers)))
        self.ln_f = nn.LayerNorm(options.width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.ln_f(self.h(self.wte(tokens) + self.wpe.weight[: tokens.shape[1]])) @ self.wte.weight.T


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, linear: partial[layers.Linear]):
        self.heads, self.ln_1, self.ln_2 = heads, norm(width), norm(width)
        self.attn = nnx.Dict(c_attn=linear(width, 3 * width), c_proj=linear(width, width))
        self.mlp = nnx.Dict(c_fc=linear(width, 4 * width), c_proj=linear(4 * width, width))

    def __call__(self, x: jnp.ndarray) -> jnp.ndarray:
        q, k, v = jnp.moveaxis(self.attn.c_attn(self.ln_1(x)).reshape(*x.shape[:2], 3, self.heads, -1), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        seen = nnx.softmax(scores, where=jnp.tri(x.shape[1], dtype=bool))  # jax.nn.dot_product_attention's is float32
        x = x + self.attn.c_proj(jnp.einsum("bhqk,bkhd->bqhd", seen, v).reshape(x.shape))
        return x + self.mlp.c_proj(nnx.gelu(self.mlp.c_fc(self.ln_2(x)), approximate=True))


class GPT2(nnx.Module):
    def __init__(self, options: Options, config: TrainConfig):
        self.wte, self.wpe = (nnx.Dict(embedding=nnx.Param(jnp.asarray(x))) for x in options.tables())
        linear = partial(layers.Linear, generator=Generator(config.seed))
        self.h = nnx.List([Block(options.width, options.heads, linear) for _ in range(options.layers)])
        self.ln_f = norm(options.width)

    def __call__(self, tokens: jnp.ndarray) -> jnp.ndarray:
        x = self.wte.embedding[tokens] + self.wpe.embedding[None, : tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.embedding.T


def torch_loss(model: TorchGPT2, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]).transpose(1, 2), batch["y"].long(), reduction="none")


def jax_loss(model: GPT2, batch: dict[str, jnp.ndarray]) -> jnp.ndarray:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


train_data, test_data = (lambda options: options.windows("train")), (lambda options: options.windows("val"))
torch_model, jax_model = TorchGPT2, GPT2

if __name__ == "__main__":  # Hugging Face's linear layers are (in, out), and its causal masks are stored
    linear, left = ("c_attn.weight", "c_proj.weight", "c_fc.weight"), (".attn.bias", "lm_head.weight")
    given = {key.removeprefix("transformer."): x for key, x in load_file(sys.argv[1]).items() if not key.endswith(left)}
    save_file({key: x.T.copy() if key.endswith(linear) else x for key, x in given.items()}, sys.argv[2])
