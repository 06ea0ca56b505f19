"""A small correct port of two optimizers as text, with either form of a `jax_step`; see `small_port`."""

from pathlib import Path

from tests.support import small_port
from tests.support.small_port import Change

# Deep deterministic policy gradient: a critic, an actor behind it, and a moving average of both.
TORCH = """
import copy
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(3, 8), nn.Linear(8, 2)
    def forward(self, x):
        return torch.tanh(self.fc2(F.gelu(self.fc1(x))))

class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(5, 8), nn.Linear(8, 1)
    def forward(self, x, action):
        return self.fc2(F.gelu(self.fc1(torch.cat([x, action], -1))))[:, 0]

def torch_model():
    actor, critic = Actor(), Critic()
    targets = (copy.deepcopy(net).requires_grad_(False) for net in (actor, critic))
    return nn.ModuleDict(dict(zip(("actor", "critic", "actor_target", "critic_target"), (actor, critic, *targets))))

def configure_optimizers(model):
    return {
        "actor": torch.optim.Adam(model["actor"].parameters(), lr=1e-2),
        "critic": torch.optim.SGD(model["critic"].parameters(), lr=0.1, momentum=0.9),
    }

def torch_step(model, optimizers, batch):
    with torch.no_grad():
        value = model["critic_target"](batch["next"], model["actor_target"](batch["next"]))
    critic = F.mse_loss(model["critic"](batch["x"], batch["action"]), batch["reward"] + 0.9 * value)
    optimizers["critic"].zero_grad()
    critic.backward()
    optimizers["critic"].step()
    actor = -model["critic"](batch["x"], model["actor"](batch["x"])).mean()
    optimizers["actor"].zero_grad()
    actor.backward()
    nn.utils.clip_grad_norm_(model["actor"].parameters(), 0.05)
    optimizers["actor"].step()
    with torch.no_grad():
        for name in ("actor", "critic"):
            for target, online in zip(model[f"{name}_target"].parameters(), model[name].parameters()):
                target.lerp_(online, 0.1)
    return {"actor": actor, "critic": critic}

def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    return {name: rng.normal(size=(6, size) if size else 6) for name, size in SIZES.items()}

SIZES = {"x": 3, "next": 3, "action": 2, "reward": 0}
RATE = 0.1

def clipped(gradients):
    import jax, optax
    share = jax.numpy.minimum(1, 0.05 / (optax.tree.norm(gradients) + 1e-6))
    return jax.tree.map(lambda gradient: share * gradient, gradients)
"""

MODULES = """
def jax_model():
    from flax import nnx
    from jax import numpy as jnp
    class Actor(nnx.Module):
        def __init__(self, rngs):
            self.fc1, self.fc2 = nnx.Linear(3, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)
        def __call__(self, x):
            return jnp.tanh(self.fc2(nnx.gelu(self.fc1(x), approximate=False)))
    class Critic(nnx.Module):
        def __init__(self, rngs):
            self.fc1, self.fc2 = nnx.Linear(5, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)
        def __call__(self, x, action):
            return self.fc2(nnx.gelu(self.fc1(jnp.concatenate([x, action], -1)), approximate=False))[:, 0]
    rngs = nnx.Rngs(0)
    return dict(actor=Actor(rngs), critic=Critic(rngs), actor_target=Actor(rngs), critic_target=Critic(rngs))

def jax_optimizer(model):
    import optax
    from flax import nnx
    kinds = {
        "actor": optax.adam(1e-2),
        "critic": optax.sgd(0.1, momentum=0.9),
    }
    return {name: nnx.Optimizer(model[name], kind, wrt=nnx.Param) for name, kind in kinds.items()}

def jax_step(model, optimizers, batch):
    import jax
    from flax import nnx
    def update(name, loss, change=lambda gradients: gradients):
        value, gradients = nnx.value_and_grad(loss)(model[name])
        optimizers[name].update(model[name], change(jax.lax.pmean(gradients, "replica")))
        return value
    value = model["critic_target"](batch["next"], model["actor_target"](batch["next"]))
    wanted = batch["reward"] + 0.9 * value
    critic = update("critic", lambda critic: ((critic(batch["x"], batch["action"]) - wanted) ** 2).mean())
    actor = update("actor", lambda actor: -model["critic"](batch["x"], actor(batch["x"])).mean(), clipped)
    for name in ("actor", "critic"):
        target, online = nnx.state(model[f"{name}_target"]), nnx.state(model[name])
        nnx.update(model[f"{name}_target"], jax.tree.map(lambda t, o: t + RATE * (o - t), target, online))
    return {"actor": actor, "critic": critic}
"""

TREES = """
def dense(layer, x):
    return x @ layer["kernel"] + layer["bias"]

def perceptron(layers, x):
    import jax
    return dense(layers["fc2"], jax.nn.gelu(dense(layers["fc1"], x), approximate=False))

def act(layers, x):
    return jax_numpy().tanh(perceptron(layers, x))

def judge(layers, x, action):
    return perceptron(layers, jax_numpy().concatenate([x, action], -1))[:, 0]

def jax_numpy():
    from jax import numpy
    return numpy

def layers(*sizes):
    shapes = zip(("fc1", "fc2"), zip(sizes, sizes[1:]))
    return {name: {"kernel": np.ones(shape, "float32"), "bias": np.ones(shape[1], "float32")} for name, shape in shapes}

def jax_model():
    names = ("actor", "critic", "actor_target", "critic_target")
    return {name: layers(3, 8, 2) if "actor" in name else layers(5, 8, 1) for name in names}

import optax
jax_optimizer = {"actor": optax.adam(1e-2), "critic": optax.sgd(0.1, momentum=0.9)}

def jax_step(optimizers, state, batch):
    import dataclasses, jax
    params, opt_state = dict(state.params), dict(state.opt_state)
    def update(name, loss, change=lambda gradients: gradients):
        value, gradients = jax.value_and_grad(loss)(params[name])
        gradients = change(jax.lax.pmean(gradients, "replica"))
        updates, opt_state[name] = optimizers[name].update(gradients, opt_state[name], params[name])
        params[name] = optax.apply_updates(params[name], updates)
        return value
    value = judge(params["critic_target"], batch["next"], act(params["actor_target"], batch["next"]))
    wanted = batch["reward"] + 0.9 * value
    critic = update("critic", lambda critic: ((judge(critic, batch["x"], batch["action"]) - wanted) ** 2).mean())
    actor = update("actor", lambda actor: -judge(params["critic"], batch["x"], act(actor, batch["x"])).mean(), clipped)
    for name in ("actor", "critic"):
        params[f"{name}_target"] = optax.incremental_update(params[name], params[f"{name}_target"], RATE)
    return dataclasses.replace(state, params=params, opt_state=opt_state), {"actor": actor, "critic": critic}
"""


def write(folder: Path, *changes: Change, form: str = MODULES, more: str = "") -> Path:
    """Write the port with pieces replaced, and `more` appended; return the path."""
    return small_port.write(folder, *changes, more=more, text=TORCH + form)
