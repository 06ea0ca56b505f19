"""Record both loops from the same weights."""

import numpy as np
from jax_half import jax_training
from torch_half import make_model, torch_training

from jaxddp.parity import Recorder


def batch(step):
    x = np.random.default_rng(step).normal(0.5, 1, (16, 6)).astype("float32")
    return {"x": x, "y": np.sin(x.sum(-1))}


model, batches = make_model(), [batch(step) for step in range(6)]
params = {name: {"kernel": model[int(name)].weight.detach().numpy().T.copy()} for name in ("0", "2")}
for name in params:
    params[name]["bias"] = model[int(name)].bias.detach().numpy().copy()
torch_training(model, batches, Recorder("torch_run"))
jax_training(params, batches, Recorder("jax_run"))
