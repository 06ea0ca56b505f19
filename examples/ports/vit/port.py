"""ViT-Ti, timm's and a Linen one: one fused qkv layer against query, key and value, class token, learned positions.

    python -m jaxddp.parity examples/ports/vit/port.py --steps 3

AdamW decays matrices only; the rate warms up and falls by a cosine. `--write-names` wrote `names`.
"""

import flax_vit
import numpy as np
import optax
import torch_vit
from jax import numpy as jnp
from torch import optim
from torch.nn import functional as F
from torch.optim import lr_scheduler

from jaxddp.parity import part

CLASSES, SIZE, PATCH, DEPTH, BATCH = 100, 64, 16, 4, 8  # ViT-Ti has 12 blocks
LR, FIRST_LR, WEIGHT_DECAY, WARM_UP, STEPS = 1e-3, 1e-4, 0.05, 5, 100


def torch_model():
    return torch_vit.vit_tiny(SIZE, PATCH, CLASSES, DEPTH)


def flax_model():
    return flax_vit.vit_tiny(CLASSES, PATCH, DEPTH)


def torch_loss(model, batch):
    return F.cross_entropy(model(batch["image"]), batch["label"])


def flax_loss(model, batch):
    logits = model(jnp.moveaxis(batch["image"], 1, -1))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def configure_optimizers(model):
    optimizer = optim.AdamW(torch_vit.param_groups_weight_decay(model, WEIGHT_DECAY), lr=LR)
    warm_up = lr_scheduler.LinearLR(optimizer, FIRST_LR / LR, total_iters=WARM_UP)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, STEPS - WARM_UP)
    return optimizer, lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [WARM_UP])


schedule = optax.warmup_cosine_decay_schedule(FIRST_LR, LR, WARM_UP, STEPS)
flax_optimizer = optax.adamw(schedule, weight_decay=WEIGHT_DECAY, mask=flax_vit.decayed)


def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    label = rng.integers(0, CLASSES, BATCH)
    image = rng.normal(0.1 * label[:, None, None, None], 1, (BATCH, 3, SIZE, SIZE))
    return {"image": image, "label": label}


names = {
    "embedding": "patch_embed.proj",
    "encoderblock_0.LayerNorm_0": "blocks.0.norm1",
    "encoderblock_0.LayerNorm_1": "blocks.0.norm2",
    "encoderblock_0.MlpBlock_0.Dense_0": "blocks.0.mlp.fc1",
    "encoderblock_0.MlpBlock_0.Dense_1": "blocks.0.mlp.fc2",
    "encoderblock_1.LayerNorm_0": "blocks.1.norm1",
    "encoderblock_1.LayerNorm_1": "blocks.1.norm2",
    "encoderblock_1.MlpBlock_0.Dense_0": "blocks.1.mlp.fc1",
    "encoderblock_1.MlpBlock_0.Dense_1": "blocks.1.mlp.fc2",
    "encoderblock_2.LayerNorm_0": "blocks.2.norm1",
    "encoderblock_2.LayerNorm_1": "blocks.2.norm2",
    "encoderblock_2.MlpBlock_0.Dense_0": "blocks.2.mlp.fc1",
    "encoderblock_2.MlpBlock_0.Dense_1": "blocks.2.mlp.fc2",
    "encoderblock_3.LayerNorm_0": "blocks.3.norm1",
    "encoderblock_3.LayerNorm_1": "blocks.3.norm2",
    "encoderblock_3.MlpBlock_0.Dense_0": "blocks.3.mlp.fc1",
    "encoderblock_3.MlpBlock_0.Dense_1": "blocks.3.mlp.fc2",
    "encoder_norm": "norm",
    "cls": "cls_token",
    "pos_embedding": "pos_embed",
    "encoderblock_0.MultiHeadDotProductAttention_0.out": "blocks.0.attn.proj",
    "encoderblock_1.MultiHeadDotProductAttention_0.out": "blocks.1.attn.proj",
    "encoderblock_2.MultiHeadDotProductAttention_0.out": "blocks.2.attn.proj",
    "encoderblock_3.MultiHeadDotProductAttention_0.out": "blocks.3.attn.proj",
    "encoderblock_0.MultiHeadDotProductAttention_0.query": part("blocks.0.attn.qkv", 0, of=3),
    "encoderblock_0.MultiHeadDotProductAttention_0.key": part("blocks.0.attn.qkv", 1, of=3),
    "encoderblock_0.MultiHeadDotProductAttention_0.value": part("blocks.0.attn.qkv", 2, of=3),
    "encoderblock_1.MultiHeadDotProductAttention_0.query": part("blocks.1.attn.qkv", 0, of=3),
    "encoderblock_1.MultiHeadDotProductAttention_0.key": part("blocks.1.attn.qkv", 1, of=3),
    "encoderblock_1.MultiHeadDotProductAttention_0.value": part("blocks.1.attn.qkv", 2, of=3),
    "encoderblock_2.MultiHeadDotProductAttention_0.query": part("blocks.2.attn.qkv", 0, of=3),
    "encoderblock_2.MultiHeadDotProductAttention_0.key": part("blocks.2.attn.qkv", 1, of=3),
    "encoderblock_2.MultiHeadDotProductAttention_0.value": part("blocks.2.attn.qkv", 2, of=3),
    "encoderblock_3.MultiHeadDotProductAttention_0.query": part("blocks.3.attn.qkv", 0, of=3),
    "encoderblock_3.MultiHeadDotProductAttention_0.key": part("blocks.3.attn.qkv", 1, of=3),
    "encoderblock_3.MultiHeadDotProductAttention_0.value": part("blocks.3.attn.qkv", 2, of=3),
}
