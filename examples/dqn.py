"""Deep Q-learning (Mnih et al. 2015) of a frozen lake from stored transitions, in Flax and in PyTorch.

    jaxddp train examples/dqn.py --output runs/jax        # 2 s
    python -m torch_ref.train examples/dqn.py --output runs/torch   # 10 s

From epoch 4 on the greedy action is optimal on all 53 fields, in both (two CPU cores, 2026-11-25). With
`--dtype float64` their losses of each epoch are equal to 1e-13, and `jaxddp check` says equal. A slippery
lake on the 8 GPUs of a node, or the same after `torchrun --nproc-per-node 8 -m torch_ref.train`:

    jaxddp train examples/dqn.py --slip 0.5 --transitions 1000000 --width 512 --discount 0.99 \
        --global-batch-size 8192 --epochs 50 --output runs/dqn
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import torch
from flax import nnx
from jax import numpy as jnp
from torch import Tensor, nn
from torch.nn import functional as F

from jaxddp import TrainConfig, layers
from jaxddp.data.torch_rng import Generator

epochs, global_batch_size = 6, 128
LAKE = "SFFFFFFFFFFFFFFFFFFHFFFFFFFFFHFFFFFHFFFFFHHFFFHFFHFFHFHFFFFHFFFG"  # Gymnasium's FrozenLake8x8-v1
FIELDS = np.eye(64, dtype=np.float32)  # what the network sees of each field
ENDS = np.array([field in "HG" for field in LAKE])
GOAL, ACTIONS = 63, ((0, -1), (1, 0), (0, 1), (-1, 0))


@dataclass
class Options:
    transitions: int = 20_000
    slip: float = 0.0
    """Probability that another action is taken than the one chosen."""
    width: int = 64
    discount: float = 0.9
    polyak: float = 0.02
    """Share of the network's weights that the target network takes over in a step."""
    rate: float = 1e-3


def moved(state: Any, action: Any) -> Any:
    """Return the states after actions; who walks against a border stays."""
    row, column = np.divmod(state, 8)
    down, right = np.moveaxis(np.array(ACTIONS)[action], -1, 0)
    return 8 * np.clip(row + down, 0, 7) + np.clip(column + right, 0, 7)


def train_data(options: Options) -> dict[str, np.ndarray]:
    """Draw transitions of a random policy from random fields."""
    rng = np.random.default_rng(0)
    state = rng.choice(np.flatnonzero(~ENDS), options.transitions)
    action = rng.integers(0, 4, options.transitions)
    slips = rng.random(options.transitions) < options.slip
    after = moved(state, np.where(slips, rng.integers(0, 4, options.transitions), action))
    reward = (after == GOAL).astype(np.float32)
    ends = ENDS[after].astype(np.float32)
    return {"state": FIELDS[state], "action": action, "next": FIELDS[after], "reward": reward, "ends": ends}


def test_data(options: Options) -> dict[str, np.ndarray]:
    """Return all fields, with the bits of the actions that value iteration finds best."""
    states = np.arange(64)
    after = np.stack([moved(states, np.full(64, action)) for action in range(4)], 1)
    values = np.zeros((64, 4))
    for _ in range(1000):
        of_field = (after == GOAL) + options.discount * np.where(ENDS[after], 0, values.max(1)[after])
        values = (1 - options.slip) * of_field + options.slip * of_field.mean(1, keepdims=True)
    best = (values > values.max(1, keepdims=True) - 1e-9) @ (1, 2, 4, 8)
    return {"state": FIELDS[~ENDS], "best": best[~ENDS]}


def predict(model: Any, batch: dict[str, Any]) -> Any:
    return model.online(batch["state"])


def metrics(values: Any, batch: dict[str, Any]) -> dict[str, Any]:
    return {"optimal": batch["best"] >> values.argmax(-1) & 1}


class TorchAgent(nn.Module):
    def __init__(self, options: Options):
        super().__init__()
        self.online, self.target = (
            nn.Sequential(nn.Linear(64, options.width), nn.ReLU(), nn.Linear(options.width, 4)) for _ in range(2)
        )
        self.target.load_state_dict(self.online.state_dict())


def configure_optimizers(model: TorchAgent, options: Options) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.online.parameters(), lr=options.rate)


def torch_step(
    model: TorchAgent, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], options: Options
) -> Tensor:
    with torch.no_grad():
        future = model.target(batch["next"]).amax(1)
        goal = batch["reward"] + options.discount * (1 - batch["ends"]) * future
    value = model.online(batch["state"]).gather(1, batch["action"][:, None])[:, 0]
    loss = F.huber_loss(value, goal)
    optimizer.zero_grad()
    loss.backward()  # averages the gradients over the ranks
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(model.target.parameters(), model.online.parameters(), strict=True):
            slow.lerp_(fast, options.polyak)
    return loss


class Agent(nnx.Module):
    def __init__(self, options: Options, config: TrainConfig):
        linear = partial(layers.Linear, generator=Generator(config.seed))  # torch's initial weights
        self.online = nnx.Sequential(linear(64, options.width), nnx.relu, linear(options.width, 4))
        self.target = nnx.clone(self.online)


def jax_optimizer(model: Agent, options: Options) -> nnx.Optimizer:
    return nnx.Optimizer(model.online, optax.adam(options.rate), wrt=nnx.Param)


def jax_step(model: Agent, optimizer: nnx.Optimizer, batch: dict[str, jax.Array], options: Options) -> jax.Array:
    future = model.target(batch["next"]).max(1)
    goal = batch["reward"] + options.discount * (1 - batch["ends"]) * future

    def loss_of(online: nnx.Module) -> jax.Array:
        value = jnp.take_along_axis(online(batch["state"]), batch["action"][:, None], 1)[:, 0]
        return optax.huber_loss(value, goal).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model.online)
    optimizer.update(model.online, jax.lax.pmean(gradients, "replica"))
    moved = optax.incremental_update(nnx.state(model.online), nnx.state(model.target), options.polyak)
    nnx.update(model.target, moved)
    return loss


torch_model, jax_model = TorchAgent, Agent
names = {"online.layers": "online", "target.layers": "target"}
