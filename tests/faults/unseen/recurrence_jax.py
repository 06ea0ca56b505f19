"""The state spaces in flax.nnx: one head of one example by `jax.lax.scan`, and `jax.vmap` for the others."""

import jax
import optax
from flax import nnx
from jax import numpy as jnp

WIDTH, HEADS, SIZE, STATE = 18, 4, 4, 3
INNER = HEADS * SIZE


def one_head(rate, through, x, steps, b, c):
    """Run a recurrence over x (T, SIZE) with step sizes (T,) and projections b and c (T, STATE)."""

    def advance(state, now):
        x, step, b, c = now
        state = jnp.exp(step * rate) * state + step * jnp.outer(x, b)
        return state, state @ c

    zeros = jnp.zeros((SIZE, STATE), x.dtype)
    _, y = jax.lax.scan(advance, zeros, (x, steps, b, c))
    return y + through * x


heads = jax.vmap(one_head, in_axes=(0, 0, 1, 1, None, None), out_axes=1)
examples = jax.vmap(heads, in_axes=(None, None, 0, 0, 0, 0))


class Recurrence(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inputs = nnx.Linear(WIDTH, 2 * INNER + 2 * STATE + HEADS, use_bias=False, rngs=rngs)
        self.window = nnx.Conv(INNER, INNER, (3,), padding="CAUSAL", feature_group_count=INNER, rngs=rngs)
        self.step_bias = nnx.Param(jnp.full(HEADS, -1.0))
        self.log_rate = nnx.Param(jnp.log(jnp.arange(1.0, HEADS + 1)))
        self.through = nnx.Param(jnp.ones(HEADS))
        self.gain = nnx.Param(jnp.ones(INNER))
        self.outputs = nnx.Linear(INNER, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, u: jax.Array) -> jax.Array:
        ends = [INNER, 2 * INNER, 2 * INNER + STATE, 2 * INNER + 2 * STATE]
        gate, x, b, c, steps = jnp.split(self.inputs(u), ends, axis=-1)
        x = nnx.silu(self.window(x)).reshape(*x.shape[:2], HEADS, SIZE)
        steps = jax.nn.softplus(steps + self.step_bias[...])
        rate = -jnp.exp(self.log_rate[...])
        y = examples(rate, self.through[...], x, steps, b, c).reshape(gate.shape)
        y = y * nnx.silu(gate)
        y = y / jnp.sqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-5)
        return self.outputs(y * self.gain[...])


class Forecast(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(3, WIDTH, rngs=rngs)
        self.norms = nnx.List(
            [nnx.LayerNorm(WIDTH, epsilon=1e-5, use_fast_variance=False, rngs=rngs) for _ in range(2)]
        )
        self.recurrences = nnx.List([Recurrence(rngs) for _ in range(2)])
        self.last = nnx.Linear(WIDTH, 6, rngs=rngs)

    def __call__(self, series: jax.Array) -> jax.Array:
        x = self.first(series)
        for norm, recurrence in zip(self.norms, self.recurrences, strict=True):
            x = x + recurrence(norm(x))
        return self.last(x)


def jax_model():
    return Forecast(nnx.Rngs(0))


def jax_loss(model, batch):
    past, future = batch["series"][:, :-1], batch["series"][:, 1:]
    mean, log_variance = jnp.split(model(past), 2, axis=-1)
    surprise = jnp.square(future - mean) * jnp.exp(-log_variance)
    return 0.5 * jnp.mean(log_variance + surprise)


jax_optimizer = optax.adamw(2e-3, weight_decay=0.01)

names = {"first": "encoder", "last": "decoder"}
for i in range(2):
    names |= {
        f"recurrences.{i}.inputs": f"mixers.{i}.in_proj",
        f"recurrences.{i}.window": f"mixers.{i}.conv1d",
        f"recurrences.{i}.step_bias": f"mixers.{i}.dt_bias",
        f"recurrences.{i}.log_rate": f"mixers.{i}.A_log",
        f"recurrences.{i}.through": f"mixers.{i}.D",
        f"recurrences.{i}.gain": f"mixers.{i}.norm.weight",
        f"recurrences.{i}.outputs": f"mixers.{i}.out_proj",
    }
