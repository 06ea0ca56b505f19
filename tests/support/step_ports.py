"""A small correct port of a `torch_step`, as text: an online network, a target network and an average, with images."""

STEP_PORT = """
import copy
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, LR = 8, 1e-2

class TorchNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.body = nn.Linear(18, WIDTH)
        self.head = nn.Linear(WIDTH, 4)
    def forward(self, x):
        return self.head(torch.tanh(self.body(torch.relu(self.conv(x / 255.0)).flatten(1))))

def torch_model():
    nets = {"online": TorchNet()}
    nets["slow"] = copy.deepcopy(nets["online"]).requires_grad_(False)
    nets["average"] = copy.deepcopy(nets["online"]).requires_grad_(False)
    return nn.ModuleDict(nets)

def configure_optimizers(nets):
    return torch.optim.Adam(nets["online"].parameters(), lr=LR)

def torch_step(nets, optimizer, batch):
    with torch.no_grad():
        target = batch["r"] + 0.9 * nets["slow"](batch["next"]).max(1)[0]
    value = nets["online"](batch["x"]).gather(1, batch["a"][:, None])[:, 0]
    loss = F.mse_loss(value, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for name in ("slow", "average"):
            for slow, fast in zip(nets[name].parameters(), nets["online"].parameters()):
                slow.lerp_(fast, 0.1)
    return loss

def jax_model():
    from flax import nnx
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(2, 3, (3, 3), padding="VALID", rngs=rngs)
            self.fc1 = nnx.Linear(18, WIDTH, rngs=rngs)
            self.fc2 = nnx.Linear(WIDTH, 4, rngs=rngs)
        def __call__(self, x):
            x = nnx.relu(self.conv(x.transpose(0, 2, 3, 1) / 255.0))
            return self.fc2(nnx.tanh(self.fc1(x.reshape(len(x), -1))))
    return {name: Net(nnx.Rngs(0)) for name in ("target", "ema", "net")}

def jax_optimizer(nets):
    import optax
    from flax import nnx
    return nnx.Optimizer(nets["net"], optax.adam(LR), wrt=nnx.Param)

def jax_step(nets, optimizer, batch):
    import jax, optax
    from flax import nnx
    from jax import numpy as jnp
    target = batch["r"] + 0.9 * nets["target"](batch["next"]).max(1)
    def loss_fn(net):
        return jnp.mean((jnp.take_along_axis(net(batch["x"]), batch["a"][:, None], 1)[:, 0] - target) ** 2)
    loss, gradients = nnx.value_and_grad(loss_fn)(nets["net"])
    optimizer.update(nets["net"], jax.lax.pmean(gradients, "replica"))
    for name in ("target", "ema"):
        nnx.update(nets[name], optax.incremental_update(nnx.state(nets["net"]), nnx.state(nets[name]), 0.1))
    return loss

def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    x, after = rng.integers(0, 256, (2, 6, 2, 4, 5)).astype(np.uint8)
    return {"x": x, "next": after, "a": rng.integers(0, 4, 6), "r": rng.normal(size=6)}
"""
# What --write-names writes.
NAMES = """
from jaxddp.parity import flattened
names = {
    "target": "slow",
    "target.fc1": flattened("slow.body", (3, 2, 3)),
    "target.fc2": "slow.head",
    "net": "online",
    "net.fc1": flattened("online.body", (3, 2, 3)),
    "net.fc2": "online.head",
    "ema": "average",
    "ema.fc1": flattened("average.body", (3, 2, 3)),
    "ema.fc2": "average.head",
}
"""
