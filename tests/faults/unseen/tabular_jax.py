"""The quantile regression as functions of parameters and of a state with the running statistics."""

import jax
import numpy as np
import optax
from jax import numpy as jnp

WIDTH = 24
LEVELS = np.array([0.1, 0.5, 0.9])


def dense(rng, inputs, outputs):
    return {"w": rng.normal(0, inputs**-0.5, (inputs, outputs)), "b": np.zeros(outputs)}


def jax_model():
    rng = np.random.default_rng(0)

    def residual():
        return {
            "scale": np.ones(WIDTH),
            "offset": np.zeros(WIDTH),
            "inner": dense(rng, WIDTH, WIDTH),
            "outer": dense(rng, WIDTH, WIDTH),
        }

    params = {
        "waves": rng.normal(0, 0.3, (5, 3)),
        "tables": [rng.normal(0, 1, (n, 4)) for n in (6, 8, 9)],
        "first": dense(rng, 42, WIDTH),
        "residuals": [residual(), residual()],
        "last": dense(rng, WIDTH, 3),
    }
    state = [{"mean": np.zeros(WIDTH), "variance": np.ones(WIDTH)} for _ in range(2)]
    return jax.tree.map(jnp.asarray, (params, state))


def linear(layer, x):
    return jnp.dot(x, layer["w"]) + layer["b"]


def batch_norm(layer, running, x):
    """Normalise x (B, WIDTH), and return the running statistics after it, too."""
    mean, variance = x.mean(axis=0), x.var(axis=0)
    y = layer["scale"] * (x - mean) / jnp.sqrt(variance + 1e-5) + layer["offset"]
    seen = {"mean": mean, "variance": variance * len(x) / (len(x) - 1)}
    return y, jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, running, seen)


def apply(params, state, numbers, categories):
    angles = 2 * jnp.pi * numbers[:, :, None] * params["waves"]
    features = [jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=2).reshape(len(numbers), -1)]
    for column, table in enumerate(params["tables"]):
        features.append(table[categories[:, column]])
    x = linear(params["first"], jnp.concatenate(features, axis=1))
    after = []
    for layer, running in zip(params["residuals"], state, strict=True):
        z, running = batch_norm(layer, running, x)
        z = jax.nn.relu(linear(layer["inner"], z))
        x = x + linear(layer["outer"], z)
        after.append(running)
    return linear(params["last"], jax.nn.relu(x)), after


def jax_loss(params, state, batch):
    predicted, state = apply(params, state, batch["x_num"], batch["x_cat"])
    missing = batch["y"][:, None] - predicted
    costs = jnp.where(missing > 0, LEVELS, LEVELS - 1) * missing
    return costs.mean(axis=0).sum(), state


jax_optimizer = optax.chain(optax.add_decayed_weights(1e-2), optax.adam(1e-3))

names = {"waves": "periodic.coefficients", "last": "head"}
for i in range(3):
    names[f"tables.{i}"] = f"embeddings.{i}.weight"
for i in range(2):
    names |= {
        f"residuals.{i}.scale": f"layers.{i}.norm.weight",
        f"residuals.{i}.offset": f"layers.{i}.norm.bias",
        f"residuals.{i}.inner": f"layers.{i}.linear1",
        f"residuals.{i}.outer": f"layers.{i}.linear2",
        f"{i}.mean": f"layers.{i}.norm.running_mean",
        f"{i}.variance": f"layers.{i}.norm.running_var",
    }
