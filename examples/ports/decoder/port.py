"""nanoGPT's character model and its port to flax.linen.

    jaxddp check examples/ports/decoder/port.py

`names` is as `--write-names` has written it.
"""

import flax_decoder
import numpy as np
import optax
import torch
from torch_decoder import GPT, GPTConfig, get_lr

BLOCKS, LENGTH, BATCH = 3, 64, 2  # nanoGPT's: 6, 256, 64
LR, WARMUP, DECAY_ITERS, MIN_LR = 1e-3, 100, 5000, 1e-4
WEIGHT_DECAY, BETAS = 0.1, (0.9, 0.99)
clip_grad_norm = 1.0  # by norm + 1e-6, as clip_grad_norm_; optax.clip_by_global_norm divides by the norm
no_twin = [f"transformer.h.{i}.attn.bias" for i in range(BLOCKS)]  # causal masks


def torch_model():
    return GPT(GPTConfig(n_layer=BLOCKS))


def torch_loss(model, batch):
    return model(batch["x"], batch["y"])[1]


def configure_optimizers(model):
    optimizer = model.configure_optimizers(WEIGHT_DECAY, LR, BETAS)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda it: get_lr(it, LR, WARMUP, DECAY_ITERS, MIN_LR) / LR
    )


def jax_model():
    return flax_decoder.GPT(flax_decoder.GPTConfig(num_layers=BLOCKS))


def jax_loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


jax_optimizer = flax_decoder.make_optimizer(LR, WARMUP, DECAY_ITERS, MIN_LR, WEIGHT_DECAY, *BETAS)


def batch(step, rank):
    tokens = np.random.default_rng((step, rank)).integers(0, 65, (BATCH, LENGTH + 1)).cumsum(1) % 65
    return {"x": tokens[:, :-1], "y": tokens[:, 1:]}


names = {
    "wte": "transformer.wte",
    "wpe": "transformer.wpe",
    "Block_0.LayerNorm_0": "transformer.h.0.ln_1",
    "Block_0.SelfAttention_0.Dense_0": "transformer.h.0.attn.c_attn",
    "Block_0.SelfAttention_0.Dense_1": "transformer.h.0.attn.c_proj",
    "Block_0.LayerNorm_1": "transformer.h.0.ln_2",
    "Block_0.MLP_0.Dense_0": "transformer.h.0.mlp.c_fc",
    "Block_0.MLP_0.Dense_1": "transformer.h.0.mlp.c_proj",
    "Block_1.LayerNorm_0": "transformer.h.1.ln_1",
    "Block_1.SelfAttention_0.Dense_0": "transformer.h.1.attn.c_attn",
    "Block_1.SelfAttention_0.Dense_1": "transformer.h.1.attn.c_proj",
    "Block_1.LayerNorm_1": "transformer.h.1.ln_2",
    "Block_1.MLP_0.Dense_0": "transformer.h.1.mlp.c_fc",
    "Block_1.MLP_0.Dense_1": "transformer.h.1.mlp.c_proj",
    "Block_2.LayerNorm_0": "transformer.h.2.ln_1",
    "Block_2.SelfAttention_0.Dense_0": "transformer.h.2.attn.c_attn",
    "Block_2.SelfAttention_0.Dense_1": "transformer.h.2.attn.c_proj",
    "Block_2.LayerNorm_1": "transformer.h.2.ln_2",
    "Block_2.MLP_0.Dense_0": "transformer.h.2.mlp.c_fc",
    "Block_2.MLP_0.Dense_1": "transformer.h.2.mlp.c_proj",
    "LayerNorm_0": "transformer.ln_f",
}
