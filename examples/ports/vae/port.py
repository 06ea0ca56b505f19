"""A VAE, that of pytorch/examples and a Linen one like that of flax/examples; each draws its own noise.

    python -m jaxddp.parity examples/ports/vae/port.py --steps 3

The check gives both the same noise. `--write-names` wrote `names`.
"""

import jax
import numpy as np
import optax
from flax_vae import VAE, binary_cross_entropy_with_logits, kl_divergence
from torch import optim
from torch_vae import VAE as TorchVAE
from torch_vae import loss_function

LR, BATCH = 1e-3, 128


def torch_model():
    return TorchVAE()


def flax_model():
    return VAE()


def torch_loss(model, batch):
    recon_batch, mu, logvar = model(batch["x"])
    return loss_function(recon_batch, batch["x"], mu, logvar)


def flax_loss(model, batch):
    logits, mean, logvar = model(batch["x"], jax.random.key(0))
    losses = binary_cross_entropy_with_logits(logits, batch["x"]) + kl_divergence(mean, logvar)
    return losses.sum()  # jax's example takes the mean


def torch_optimizer(parameters):
    return optim.Adam(parameters, lr=LR)


flax_optimizer = optax.adam(LR)


def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    row, column = np.indices((28, 28))
    slope, offset = rng.normal(0, 1, (2, BATCH, 1, 1))
    stripes = np.sin((row + slope * column) / 3 + offset)
    return {"x": (stripes > 0).reshape(BATCH, 784).astype(np.float32)}


names = {
    "encoder.fc1": "fc1",
    "encoder.fc2_mean": "fc21",
    "encoder.fc2_logvar": "fc22",
    "decoder.fc1": "fc3",
    "decoder.fc2": "fc4",
}
