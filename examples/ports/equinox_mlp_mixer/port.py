"""timm's MLP-Mixer and its port to Equinox.

    jaxddp check examples/ports/equinox_mlp_mixer/port.py

`names` is as `--write-names` has written it.
"""

import jax
import numpy as np
import optax
import torch
from jax_equinox_mlp_mixer import Mixer, is_matrix, mean_loss
from torch_equinox_mlp_mixer import MlpMixer, param_groups_weight_decay

BLOCKS, SIZE, CLASSES, BATCH = 2, 96, 100, 4  # Mixer-S on ImageNet: 8, 224, 1000, 4096
LR, WEIGHT_DECAY, SMOOTHING = 1e-3, 0.05, 0.1
clip_grad_norm = 1.0


def torch_model():
    return MlpMixer(CLASSES, SIZE, num_blocks=BLOCKS)


def torch_loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"], label_smoothing=SMOOTHING)


def configure_optimizers(model):
    return torch.optim.AdamW(param_groups_weight_decay(model, WEIGHT_DECAY), lr=LR)


def jax_model():
    return Mixer(CLASSES, SIZE, BLOCKS, key=jax.random.key(0))


def jax_loss(model, batch):
    return mean_loss(model, batch["image"], batch["label"], SMOOTHING)


jax_optimizer = optax.adamw(LR, weight_decay=WEIGHT_DECAY, mask=is_matrix)


def batch(step, rank):
    """Draw waves whose frequency is the label."""
    rng = np.random.default_rng((step, rank))
    label = rng.integers(0, CLASSES, BATCH)
    waves = np.sin(np.outer(1 + label, np.arange(SIZE) / SIZE))[:, None, None]
    return {"image": rng.normal(0.5, 1, (BATCH, 3, SIZE, SIZE)) + waves, "label": label}


names = {
    "conv_in": "stem.proj",
    "blocks.0.patch_mixer.layers.0": "blocks.0.mlp_tokens.fc1",
    "blocks.0.patch_mixer.layers.1": "blocks.0.mlp_tokens.fc2",
    "blocks.0.hidden_mixer.layers.0": "blocks.0.mlp_channels.fc1",
    "blocks.0.hidden_mixer.layers.1": "blocks.0.mlp_channels.fc2",
    "blocks.1.patch_mixer.layers.0": "blocks.1.mlp_tokens.fc1",
    "blocks.1.patch_mixer.layers.1": "blocks.1.mlp_tokens.fc2",
    "blocks.1.hidden_mixer.layers.0": "blocks.1.mlp_channels.fc1",
    "blocks.1.hidden_mixer.layers.1": "blocks.1.mlp_channels.fc2",
    "fc_out": "head",
}
