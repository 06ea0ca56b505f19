"""Right programs with an evaluation, in three styles of JAX, as text; tests plant faults by replacing pieces."""

DATA = """
import numpy as np
import torch

global_batch_size, optimizer, lr = 16, "sgd", 0.1


def examples(seed, count):
    rng = np.random.default_rng(seed)
    x = rng.normal(1, 2, (count, 6)).astype("float32")
    return {"x": x, "y": (x[:, 0] * x[:, 1] > 1).astype("int64")}


def train_data():
    return examples(0, 64)


def test_data():
    return examples(1, 45)


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.norm = torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8)
        self.drop, self.fc2 = torch.nn.Dropout(0.25), torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.fc2(self.drop(torch.tanh(self.norm(self.fc1(x)))))


def torch_model():
    return TorchNet()


def torch_loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def metrics(logits, batch):
    return {"accuracy": logits.argmax(-1) == batch["y"]}
"""
NNX = (
    DATA
    + """

def predict(model, batch):
    return model(batch["x"])


def jax_model():
    from flax import nnx

    from jaxddp.layers import BatchNorm

    class FlaxNet(nnx.Module):
        def __init__(self, rngs):
            self.fc1, self.fc2 = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
            self.norm = BatchNorm(8)
            self.drop = nnx.Dropout(0.25, rngs=rngs)

        def __call__(self, x):
            return self.fc2(self.drop(nnx.tanh(self.norm(self.fc1(x)))))

    return FlaxNet(nnx.Rngs(0))


def jax_loss(model, batch):
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
"""
)
LINEN = (
    DATA.replace("torch.nn.BatchNorm1d(8)", "torch.nn.LayerNorm(8, eps=1e-6)")
    + """

def predict(model, batch):
    return model(batch["x"])


def jax_model():
    from flax import linen

    class FlaxNet(linen.Module):
        @linen.compact
        def __call__(self, x, train=False):
            x = linen.LayerNorm(name="norm")(linen.Dense(8, name="fc1")(x))
            return linen.Dense(3, name="fc2")(linen.Dropout(0.25, deterministic=not train)(linen.tanh(x)))

    return FlaxNet()


def jax_loss(model, batch, train):
    import jax
    import optax

    logits = model(batch["x"], train=train, rngs={"dropout": jax.random.key(0)})
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
"""
)
# A tree of arrays with a state, as Haiku has it: running sums and how many.
PLAIN = (
    DATA.replace("torch.nn.BatchNorm1d(8)", "torch.nn.BatchNorm1d(8, affine=False)").replace(
        "torch.nn.Dropout(0.25)", "torch.nn.Identity()"
    )
    + """

def jax_model():
    import jax.numpy as jnp

    params = {"fc1": {"w": jnp.zeros((6, 8)), "b": jnp.zeros(8)}, "fc2": {"w": jnp.zeros((8, 3)), "b": jnp.zeros(3)}}
    return params, {"norm": {"running_mean": jnp.zeros(8), "running_var": jnp.ones(8)}}


def forward(params, state, x, train):
    import jax.numpy as jnp

    x = x @ params["fc1"]["w"] + params["fc1"]["b"]
    mean, var = state["norm"]["running_mean"], state["norm"]["running_var"]
    if train:
        before, mean, var = (mean, var), x.mean(0), x.var(0)
        after = mean, var * len(x) / (len(x) - 1)
        of_mean, of_var = (0.9 * old + 0.1 * new for old, new in zip(before, after, strict=True))
        state = {"norm": {"running_mean": of_mean, "running_var": of_var}}
    x = jnp.tanh((x - mean) / jnp.sqrt(var + 1e-5))
    return x @ params["fc2"]["w"] + params["fc2"]["b"], state


def predict(*arguments):
    if len(arguments) == 2:
        model, batch = arguments
        return model(batch["x"])
    params, state, batch = arguments
    return forward(params, state, batch["x"], train=False)[0]


def jax_loss(params, state, batch, train):
    import optax

    logits, state = forward(params, state, batch["x"], train)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]), state
"""
)
PORTS = {"nnx": NNX, "linen": LINEN, "plain": PLAIN}
