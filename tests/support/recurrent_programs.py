"""A recurrent network in torch and in jax; pieces of the loss in jax are arguments, so that any can be wrong."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np
import torch
from jax import numpy as jnp
from torch import Tensor, nn
from torch.nn import functional as F

from jaxddp.parity.diagnosis.forward.loss_causes import ModelEvidence
from tests.support.read_programs import evidence_between

FEATURES, WIDTH, CLASSES, LENGTH, EXAMPLES, STEPS = 3, 4, 5, 6, 7, 2
Params = Mapping[str, jax.Array]
State = tuple[jax.Array, jax.Array]


class TorchNet(nn.Module):
    """An LSTM that reads a sequence in two chunks, a bidirectional GRU, logits of every element."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, WIDTH, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=1)
        one, state = self.lstm(first)
        two, _ = self.lstm(second, state)
        return self.out(self.gru(torch.cat([one, two], dim=1))[0])


def torch_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    losses = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="none")
    valid = batch["valid"].flatten()
    return {"loss": (losses * valid).sum() / valid.sum(), "count": torch.tensor(1.0)}


def lstm_cell(i: jax.Array, f: jax.Array, g: jax.Array, o: jax.Array, c: jax.Array) -> State:
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def product_of_candidate(r: jax.Array, h: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    return r * (h @ w.T + b)


@dataclass(frozen=True)
class Pieces:
    """Pieces of the loss in jax; the defaults are torch's.

    Attributes:
        cell: (i, f, g, o, c) -> the LSTM's next h and c.
        product: (r, h, w, b) -> what the state adds to the GRU's candidate.
        mixed: (z, n, h) -> the GRU's next state.
        carried: what becomes of the LSTM's state between the chunks.
        both: (GRU's cell forwards, its cell backwards, x) -> the outputs of both directions.
        mean: (losses, valid) -> the loss.
    """

    cell: Callable[..., State] = lstm_cell
    product: Callable[..., jax.Array] = product_of_candidate
    mixed: Callable[..., jax.Array] = lambda z, n, h: (1 - z) * n + z * h
    carried: Callable[[State], State] = lambda state: state
    both: Callable[..., list[jax.Array]] = lambda one, other, x: [one(x), other(x[::-1])[::-1]]
    mean: Callable[..., jax.Array] = lambda losses, valid: (losses * valid).sum() / valid.sum()

    def loss(self, params: Params, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Return the mean cross-entropy of the valid elements."""
        x = batch["x"].swapaxes(0, 1)
        zeros = jnp.zeros((x.shape[1], WIDTH), x.dtype)
        one, state = self.lstm(params, x[: LENGTH // 2], (zeros, zeros))
        two, _ = self.lstm(params, x[LENGTH // 2 :], self.carried(state))
        directions = [lambda x, end=end: self.gru(params, end, x) for end in ("", "_reverse")]
        both = jnp.concatenate(self.both(*directions, jnp.concatenate([one, two])), axis=-1)
        logits = (both @ params["out.weight"].T + params["out.bias"][None, None]).swapaxes(0, 1)
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][..., None], 2)[..., 0]
        return self.mean(losses, batch["valid"])

    def lstm(self, params: Params, x: jax.Array, state: State) -> tuple[jax.Array, State]:
        """Return the outputs (T, B, W) of a sequence (T, B, F), and the last state."""
        w_x, w_h, b_x, b_h = (params[f"lstm.{kind}_l0"] for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))

        def step(state: State, x_t: jax.Array) -> tuple[State, jax.Array]:
            h, c = state
            h, c = self.cell(*jnp.split(x_t @ w_x.T + b_x[None] + h @ w_h.T + b_h[None], 4, axis=-1), c)
            return (h, c), h

        state, outputs = jax.lax.scan(step, state, x)
        return outputs, state

    def gru(self, params: Params, end: str, x: jax.Array) -> jax.Array:
        """Return the outputs (T, B, W) of a sequence (T, B, F)."""
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        w_x, w_h, b_x, b_h = (params[f"gru.{kind}_l0{end}"] for kind in kinds)

        def step(h: jax.Array, x_t: jax.Array) -> tuple[jax.Array, jax.Array]:
            r_x, z_x, n_x = jnp.split(x_t @ w_x.T + b_x[None], 3, axis=-1)
            r_h, z_h = jnp.split(h @ w_h[: 2 * WIDTH].T + b_h[None, : 2 * WIDTH], 2, axis=-1)
            r, z = jax.nn.sigmoid(r_x + r_h), jax.nn.sigmoid(z_x + z_h)
            n = jnp.tanh(n_x + self.product(r, h, w_h[2 * WIDTH :], b_h[None, 2 * WIDTH :]))
            h = self.mixed(z, n, h)
            return h, h

        return jax.lax.scan(step, jnp.zeros((x.shape[1], WIDTH), x.dtype), x)[1]


@jax.numpy_rank_promotion("allow")
def evidence_of(pieces: Pieces) -> ModelEvidence:
    """Return two steps of the loss in jax, with the program that was read from it."""
    torch.manual_seed(0)
    module, rng = TorchNet().double(), np.random.default_rng(0)
    batches = [
        {
            "x": rng.normal(size=(EXAMPLES, LENGTH, FEATURES)),
            "y": rng.integers(0, CLASSES, (EXAMPLES, LENGTH)),
            "valid": (np.arange(LENGTH) < rng.integers(2, LENGTH + 1, EXAMPLES)[:, None]).astype(float),
        }
        for _ in range(STEPS)
    ]
    return evidence_between(module, torch_loss, pieces.loss, batches)
