"""DeepFM, that of pytorch-fm and an NNX one: one table for all fields against one table for each field.

    python -m jaxddp.parity examples/ports/recommender/port.py --steps 3

Torch's Adam adds the decay to the gradient. `names` is written by hand: a part of torch's tables is each field's.
"""

import numpy as np
import optax
from flax import nnx
from flax_recommender import DeepFM
from torch import optim
from torch.nn import functional as F
from torch_recommender import DeepFactorizationMachineModel

from jaxddp.parity import part

FIELDS = (7, 2, 24, 5000, 3706, 21, 300, 50)  # values of each field
EMBED, WIDTHS, DROPOUT = 16, (400, 400, 400), 0.2
LR, WEIGHT_DECAY, BATCH = 1e-3, 1e-6, 256


def torch_model():
    return DeepFactorizationMachineModel(FIELDS, EMBED, WIDTHS, DROPOUT)


def flax_model():
    return DeepFM(FIELDS, EMBED, WIDTHS, DROPOUT, nnx.Rngs(0))


def torch_loss(model, batch):
    return F.binary_cross_entropy(model(batch["fields"]), batch["clicked"])


def flax_loss(model, batch):
    return optax.sigmoid_binary_cross_entropy(model(batch["fields"]), batch["clicked"]).mean()


def torch_optimizer(parameters):
    return optim.Adam(parameters, lr=LR, weight_decay=WEIGHT_DECAY)


flax_optimizer = optax.chain(optax.add_decayed_weights(WEIGHT_DECAY), optax.adam(LR))


def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    fields = (rng.random((BATCH, len(FIELDS))) ** 3 * FIELDS).astype(int)  # low numbers are popular
    clicked = rng.random(BATCH) < 0.2 + 0.6 * (fields.sum(axis=1) % 2)
    return {"fields": fields, "clicked": clicked.astype(np.float32)}


names = {
    "hidden.0.linear": "mlp.mlp.0",
    "hidden.0.norm": "mlp.mlp.1",
    "hidden.1.linear": "mlp.mlp.4",
    "hidden.1.norm": "mlp.mlp.5",
    "hidden.2.linear": "mlp.mlp.8",
    "hidden.2.norm": "mlp.mlp.9",
    "out": "mlp.mlp.12",
    "bias": "linear.bias",
    "wide.tables.0": part("linear.fc", 0, of=(7, 2, 24, 5000, 3706, 21, 300, 50)),
    "wide.tables.1": part("linear.fc", 1, of=(7, 2, 24, 5000, 3706, 21, 300, 50)),
    "wide.tables.2": part("linear.fc", 2, of=(7, 2, 24, 5000, 3706, 21, 300, 50)),
    "wide.tables.3": part("linear.fc", 3, of=(7, 2, 24, 5000, 3706, 21, 300, 50)),
    "wide.tables.4": part("linear.fc", 4, of=(7, 2, 24, 5000, 3706, 21, 300, 50)),
    "wide.tables.5": part("linear.fc", 5, of=(7, 2, 24, 5000, 3706, 21, 300, 50)),
    "wide.tables.6": part("linear.fc", 6, of=(7, 2, 24, 5000, 3706, 21, 300, 50)),
    "wide.tables.7": part("linear.fc", 7, of=(7, 2, 24, 5000, 3706, 21, 300, 50)),
    "embed.tables.0": part("embedding.embedding", 0, of=(7, 2, 24, 5000, 3706, 21, 300, 50)),
    "embed.tables.1": part("embedding.embedding", 1, of=(7, 2, 24, 5000, 3706, 21, 300, 50)),
    "embed.tables.2": part("embedding.embedding", 2, of=(7, 2, 24, 5000, 3706, 21, 300, 50)),
    "embed.tables.3": part("embedding.embedding", 3, of=(7, 2, 24, 5000, 3706, 21, 300, 50)),
    "embed.tables.4": part("embedding.embedding", 4, of=(7, 2, 24, 5000, 3706, 21, 300, 50)),
    "embed.tables.5": part("embedding.embedding", 5, of=(7, 2, 24, 5000, 3706, 21, 300, 50)),
    "embed.tables.6": part("embedding.embedding", 6, of=(7, 2, 24, 5000, 3706, 21, 300, 50)),
    "embed.tables.7": part("embedding.embedding", 7, of=(7, 2, 24, 5000, 3706, 21, 300, 50)),
}
