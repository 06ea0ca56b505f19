"""PyTorch's word-level language model and its port to plain functions.

    jaxddp check examples/ports/functions/port.py

`names` is as `--write-names` has written it.
"""

import jax
import jax_functions
import numpy as np
import optax
import torch
from torch_functions import RNNModel

VOCAB, WIDTH, LAYERS = 2000, 200, 2  # WikiText-2 has 33,278 words
DROPOUT, BPTT, BATCH = 0.2, 35, 20
LR, clip_grad_norm = 20.0, 0.25


def torch_model():
    return RNNModel(VOCAB, WIDTH, WIDTH, LAYERS, DROPOUT, tie_weights=True)


def torch_loss(model, batch):
    data, targets = batch["words"][:, :-1].T, batch["words"][:, 1:].T
    output, _ = model(data)
    return torch.nn.functional.nll_loss(output, targets.flatten())


def torch_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=LR)


def jax_model():
    return jax_functions.init(jax.random.key(0), VOCAB, WIDTH, LAYERS)


def jax_loss(params, batch, key):
    words = batch["words"].T
    logits = jax_functions.logits(params, words[:-1], DROPOUT, key)
    return optax.softmax_cross_entropy_with_integer_labels(logits, words[1:]).mean()


jax_optimizer = optax.sgd(LR)


def batch(step, rank):
    """Draw sequences in which a word often follows the one before it."""
    rng = np.random.default_rng((step, rank))
    strides = rng.integers(1, 4, (BATCH, BPTT + 1)).cumsum(axis=1)
    return {"words": (rng.integers(0, VOCAB, (BATCH, 1)) + strides) % VOCAB}


names = {
    "cells.0.b_x": "rnn.bias_ih_l0",
    "cells.0.b_h": "rnn.bias_hh_l0",
    "cells.1.b_x": "rnn.bias_ih_l1",
    "cells.1.b_h": "rnn.bias_hh_l1",
    "embedding": "encoder.weight",
    "cells.0.w_x": "rnn.weight_ih_l0",
    "cells.0.w_h": "rnn.weight_hh_l0",
    "cells.1.w_x": "rnn.weight_ih_l1",
    "cells.1.w_h": "rnn.weight_hh_l1",
    "bias": "decoder.bias",
}
