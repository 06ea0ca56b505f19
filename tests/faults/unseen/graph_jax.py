"""The graph network as functions of a tree of parameters, with segment sums."""

import jax
import optax
from jax import numpy as jnp

WIDTH = 20


def dense(key, inputs, outputs):
    return {"w": jax.random.normal(key, (inputs, outputs)) / jnp.sqrt(inputs), "b": jnp.zeros(outputs)}


def init(key):
    keys = iter(jax.random.split(key, 20))

    def attention():
        return {
            "project": {"w": dense(next(keys), WIDTH, WIDTH)["w"]},
            "edges": dense(next(keys), 3, WIDTH),
            "of_sender": jax.random.normal(next(keys), (WIDTH,)),
            "of_receiver": jax.random.normal(next(keys), (WIDTH,)),
            "update": dense(next(keys), WIDTH, WIDTH),
        }

    return {
        "nodes": dense(next(keys), 7, WIDTH),
        "attention": [attention(), attention()],
        "norm": {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)},
        "hidden": dense(next(keys), WIDTH, 2 * WIDTH),
        "output": dense(next(keys), 2 * WIDTH, 1),
    }


def linear(layer, x):
    return x @ layer["w"] + layer["b"]


def layer_norm(layer, x):
    centred = x - x.mean(-1, keepdims=True)
    return layer["scale"] * centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) + layer["bias"]


def attend(layer, nodes, edges, senders, receivers, real):
    """Let each node attend to the edges that it receives; edges that only pad have no weight."""
    count = len(nodes)
    h = nodes @ layer["project"]["w"]
    scores = (h @ layer["of_sender"])[senders] + (h @ layer["of_receiver"])[receivers]
    strengths = jnp.exp(jax.nn.leaky_relu(scores, 0.2))
    strengths = strengths * real
    totals = jax.ops.segment_sum(strengths, receivers, count)
    weights = strengths / (totals + 1e-6)[receivers]
    messages = h[senders] + linear(layer["edges"], edges)
    received = jax.ops.segment_sum(weights[:, None] * messages, receivers, count)
    return nodes + jax.nn.elu(linear(layer["update"], received))


def predict_one(params, nodes, edges, senders, receivers, real):
    x = linear(params["nodes"], nodes)
    for layer in params["attention"]:
        x = attend(layer, x, edges, senders, receivers, real)
    pooled = layer_norm(params["norm"], x).mean(axis=0)
    return linear(params["output"], jax.nn.relu(linear(params["hidden"], pooled)))


def jax_model():
    return init(jax.random.key(0))


def jax_loss(params, batch):
    graph = (batch[name] for name in ("nodes", "edges", "senders", "receivers", "real"))
    predictions = jax.vmap(predict_one, (None, 0, 0, 0, 0, 0))(params, *graph)[:, 0]
    return optax.huber_loss(predictions, batch["target"], delta=0.5).mean() / 0.5


jax_optimizer = optax.adam(3e-3)

names = {
    "nodes": "node_encoder",
    "hidden": "readout.0",
    "output": "readout.2",
}
for i in range(2):
    names |= {
        f"attention.{i}.project": f"convs.{i}.lin",
        f"attention.{i}.edges": f"convs.{i}.edge",
        f"attention.{i}.of_sender": f"convs.{i}.att_src",
        f"attention.{i}.of_receiver": f"convs.{i}.att_dst",
        f"attention.{i}.update": f"convs.{i}.update",
    }
