"""Programs: layers, a forward pass and a loss, for both halves; `pieces` are the functions that they call.

`self.NAME` is a layer, `TABLE(NAME)` its weights, `KEY` a random key. A text alone is of both halves; texts by the name
of their style are one half's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import dedent

Text = str | Mapping[str, str]


@dataclass(frozen=True)
class Family:
    """A program.

    Attributes:
        layers: name -> kind and sizes.
        arguments: of the forward pass.
        torch, jax: bodies of the forward pass.
        loss: body of the loss of both halves; it has `model` and `batch`.
        batch: entries of a batch, by a generator `rng`.
        activations: one of them is `act`.
        draws: the forward pass of jax takes a key.
        frozen: layer that is not trained.
    """

    layers: Mapping[str, str]
    arguments: str
    torch: Text
    jax: Text
    loss: str
    batch: str
    activations: tuple[str, ...] = ()
    draws: bool = False
    frozen: str = ""


IMAGES = "x = x.permute(0, 3, 1, 2)\n"
ATTENTION = dict.fromkeys(("query", "key", "value", "out"), "linear 8 8")
ATTENDED = """
    q, k, v = (y.reshape(*y.shape[:2], 2, 4) for y in (self.query(h), self.key(h), self.value(h)))
    y = self.out(attend(q, k, v, MASK).reshape(h.shape))
"""
MLP = """
    x = act(self.norm(self.fc1(x)))
    x = x + act(self.fc2(x))
    return self.head(x)
"""
DECODER = """
    x = self.embed(words) + TABLE(places)
    h = self.norm1(x)
    {}
    x = x + y
    x = x + self.down(act(self.up(self.norm2(x))))
    return self.norm3(x) @ TABLE(embed).T
""".format(ATTENDED.strip().replace("MASK", "causal(words.shape[1])"))
ENCODER = """
    h = self.embed(words)
    {}
    x = self.norm1(h + y)
    x = self.norm2(x + self.down(act(self.up(x))))
    return self.head(pooled(x, valid))
""".format(ATTENDED.strip().replace("MASK", "valid[:, None, None]"))
GROUPED = """
    x = halved(act(self.group(self.conv1(x))))
    x = act(self.conv2(x))
    return self.head(overall(x))
"""
NORMALISED = """
    x = act(self.bn1(self.conv1(x)))
    x = halved(x + act(self.bn2(self.conv2(x))))
    return self.head(overall(x))
"""
CELL = """
    z = sigmoid(self.gate_x({0}) + self.gate_h(h))
    h = (1 - z) * h + z * act(self.new_x({0}) + self.new_h(h))
"""


def _steps(indent: str, x_t: str) -> str:
    return f"\n{indent}".join(line.strip() for line in CELL.format(x_t).strip().splitlines())


EXPERTS = """
    weights = routed(self.router(x))
    outputs = {}([self.first(x), self.second(x), self.third(x)], {}=1)
    return self.head(act((outputs * weights[..., None]).sum(1)))
"""
FAMILIES = {
    "classifier": Family(
        {"fc1": "linear 6 12", "norm": "norm 12", "fc2": "linear 12 12", "head": "linear 12 4"},
        "x",
        MLP,
        MLP,
        'return LOSS(model(batch["x"]), batch["y"])',
        '"x": rng.normal(0.2, 1, (8, 6)), "y": rng.integers(0, 4, 8)',
        ("gelu", "silu", "elu", "leaky", "hardswish"),
    ),
    "decoder": Family(
        ATTENTION
        | {"embed": "embed 9 8", "places": "embed 6 8", "norm1": "norm 8", "norm2": "norm 8", "norm3": "rms 8"}
        | {"up": "linear 8 16", "down": "linear 16 8"},
        "words",
        DECODER,
        DECODER,
        'return ignoring(model(batch["words"]), batch["labels"])',
        '"words": rng.integers(0, 9, (4, 6)), '
        '"labels": np.where(rng.random((4, 6)) < 0.7, rng.integers(0, 9, (4, 6)), -100)',
        ("gelu", "silu", "softplus"),
    ),
    "encoder": Family(
        ATTENTION
        | {"embed": "embed 9 8", "norm1": "norm 8", "norm2": "norm 8", "up": "linear 8 16", "down": "linear 16 8"}
        | {"head": "linear 8 3"},
        "words, valid",
        ENCODER,
        ENCODER,
        'return LOSS(model(batch["words"], batch["valid"]), batch["label"])',
        '"words": rng.integers(0, 9, (4, 6)), "valid": np.arange(6) < rng.integers(1, 7, (4, 1)), '
        '"label": rng.integers(0, 3, 4)',
        ("gelu", "relu", "hardswish"),
    ),
    "convnet": Family(
        {"conv1": "conv 2 4 1", "group": "group 2 4", "conv2": "conv 4 6 2", "head": "linear 6 3"},
        "x",
        IMAGES + dedent(GROUPED).strip(),
        GROUPED,
        'return LOSS(model(batch["image"]), batch["label"])',
        '"image": rng.normal(0, 1, (4, 8, 8, 2)), "label": rng.integers(0, 3, 4)',
        ("relu", "leaky", "silu", "softplus20"),
    ),
    "batch_norms": Family(
        {"conv1": "conv 2 4 1", "bn1": "batch 4", "conv2": "conv 4 4 1", "bn2": "batch 4", "head": "linear 4 3"},
        "x",
        IMAGES + dedent(NORMALISED).strip(),
        NORMALISED,
        'return cross_entropy(model(batch["image"]), batch["label"])',
        '"image": rng.normal(0.5, 1, (6, 4, 4, 2)), "label": rng.integers(0, 3, 6)',
        ("relu", "elu", "tanh"),
    ),
    "recurrent": Family(
        {"gate_x": "linear 3 5", "gate_h": "linear 5 5", "new_x": "linear 3 5", "new_h": "linear 5 5"}
        | {"head": "linear 5 2"},
        "x, lengths",
        {
            "loop": f"""
                h, outputs, sigmoid = torch.zeros(len(x), 5, dtype=x.dtype), [], torch.sigmoid
                for t in range(x.shape[1]):
                    {_steps(" " * 20, "x[:, t]")}
                    outputs.append(h)
                return self.head(last(torch.stack(outputs, dim=1), lengths))""",
            "unbind": f"""
                h, outputs, sigmoid = x.new_zeros(x.shape[0], 5), (), F.sigmoid
                for x_t in x.unbind(1):
                    {_steps(" " * 20, "x_t")}
                    outputs += (h[:, None],)
                return self.head(last(torch.cat(outputs, dim=1), lengths))""",
        },
        {
            "loop": f"""
                h, outputs, sigmoid = jnp.zeros((len(x), 5), x.dtype), [], jax.nn.sigmoid
                for t in range(x.shape[1]):
                    {_steps(" " * 20, "x[:, t]")}
                    outputs.append(h)
                return self.head(last(jnp.stack(outputs, axis=1), lengths))""",
            "scan": f"""
                sigmoid = jax.nn.sigmoid

                def step(h, x_t):
                    {_steps(" " * 20, "x_t")}
                    return h, h

                _, outputs = lax.scan(step, jnp.zeros((len(x), 5), x.dtype), x.swapaxes(0, 1))
                return self.head(last(outputs.swapaxes(0, 1), lengths))""",
        },
        'return squared(model(batch["x"], batch["lengths"]), batch["y"])',
        '"x": rng.normal(0, 1, (4, 5, 3)), "lengths": rng.integers(1, 6, 4), "y": rng.normal(0, 1, (4, 2))',
        ("tanh", "elu"),
    ),
    "autoencoder": Family(
        {"encode": "linear 6 8", "mean": "linear 8 3", "logvar": "linear 8 3", "decode": "linear 3 8"}
        | {"pixels": "linear 8 6"},
        "x",
        {
            "randn": """
                h = act(self.encode(x))
                mean, logvar = self.mean(h), self.logvar(h)
                z = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
                return self.pixels(act(self.decode(z))), mean, logvar""",
            "rsample": """
                h = act(self.encode(x))
                mean, logvar = self.mean(h), self.logvar(h)
                z = torch.distributions.Normal(mean, (0.5 * logvar).exp(), validate_args=False).rsample()
                return self.pixels(act(self.decode(z))), mean, logvar""",
        },
        """
            h = act(self.encode(x))
            mean, logvar = self.mean(h), self.logvar(h)
            z = mean + jnp.exp(logvar / 2) * jax.random.normal(KEY, mean.shape)
            return self.pixels(act(self.decode(z))), mean, logvar""",
        """
            logits, mean, logvar = model(batch["x"])
            prior = 0.5 * (mean**2 + EXP(logvar) - 1 - logvar)
            return (binary(logits, batch["x"]).sum(-1) + 0.25 * prior.sum(-1)).mean()""",
        '"x": rng.uniform(0, 1, (6, 6))',
        ("tanh", "softplus", "gelu"),
        draws=True,
    ),
    "contrastive": Family(
        {"fc1": "linear 5 8", "norm": "rms 8", "fc2": "linear 8 4", "temperature": "param 1"},
        "a, b",
        """
            a, b = (unit(self.fc2(act(self.norm(self.fc1(x))))) for x in (a, b))
            return torch.einsum("ic,jc->ij", a, b) * torch.exp(self.temperature)""",
        """
            a, b = (unit(self.fc2(act(self.norm(self.fc1(x))))) for x in (a, b))
            return jnp.exp(self.temperature) * (a @ b.T)""",
        """
            logits = model(batch["a"], batch["b"])
            own = ARANGE(len(logits))
            return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2""",
        '"a": rng.normal(0, 1, (6, 5)), "b": rng.normal(0, 1, (6, 5))',
        ("gelu", "leaky", "relu"),
    ),
    "recommender": Family(
        {"users": "embed 7 4", "films": "embed 9 4", "offset": "embed 9 1", "mix": "linear 4 4"},
        "user, seen, valid, film",
        """
            x = act(self.mix(pooled(self.films(seen), valid))) + self.users(user)
            return torch.einsum("bc,bc->b", x, self.films(film)) + self.offset(film).squeeze(-1)""",
        """
            x = self.users(user) + act(self.mix(pooled(self.films(seen), valid)))
            return jnp.sum(x * self.films(film), axis=-1) + self.offset(film)[:, 0]""",
        'return binary(model(batch["user"], batch["seen"], batch["valid"], batch["film"]), batch["liked"]).mean()',
        '"user": rng.integers(0, 7, 6), "seen": rng.integers(0, 9, (6, 4)), '
        '"valid": np.arange(4) < rng.integers(1, 5, (6, 1)), "film": rng.integers(0, 9, 6), '
        '"liked": rng.integers(0, 2, 6)',
        ("tanh", "silu", "hardswish"),
    ),
    "experts": Family(
        {"router": "linear 5 3", "first": "linear 5 6", "second": "linear 5 6", "third": "linear 5 6"}
        | {"head": "linear 6 2"},
        "x",
        EXPERTS.format("torch.stack", "dim"),
        EXPERTS.format("jnp.stack", "axis"),
        """
            losses = huber(model(batch["x"]), batch["y"]).mean(-1)
            return (losses * batch["weight"]).sum() / batch["weight"].sum()""",
        '"x": rng.normal(0, 1, (6, 5)), "y": rng.normal(0, 1, (6, 2)), "weight": rng.integers(1, 4, 6)',
        ("gelu", "silu", "leaky", "softplus"),
    ),
    "filter": Family(
        {"enter": "linear 3 6", "norm": "norm 6", "leave": "linear 12 2"},
        "x",
        """
            x = act(self.enter(x))
            return self.leave(torch.cat([self.norm(discounted(x)), running_mean(x)], dim=-1))""",
        """
            x = act(self.enter(x))
            return self.leave(jnp.concatenate([self.norm(discounted(x)), running_mean(x)], axis=-1))""",
        'return squared(model(batch["x"])[:, 1:], batch["y"][:, :-1])',
        '"x": rng.normal(0, 1, (4, 6, 3)), "y": rng.normal(0, 1, (4, 6, 2))',
        ("silu", "tanh", "softplus", "elu"),
    ),
    "graph": Family(
        {"enter": "linear 3 6", "own": "linear 6 6", "near": "linear 6 6", "norm": "norm 6", "head": "linear 6 3"},
        "edges, x",
        """
            x = act(self.enter(x))
            x = x + act(self.norm(self.own(x) + self.near(aggregated(edges, x))))
            return self.head(x.mean(dim=1))""",
        """
            x = act(self.enter(x))
            x += act(self.norm(self.near(aggregated(edges, x)) + self.own(x)))
            return self.head(jnp.sum(x, axis=1) / x.shape[1])""",
        'return LOSS(model(batch["edges"], batch["x"]), batch["label"])',
        '"edges": (rng.random((4, 5, 5)) < 0.5) | np.eye(5, dtype=bool), "x": rng.normal(0, 1, (4, 5, 3)), '
        '"label": rng.integers(0, 3, 4)',
        ("gelu", "elu", "leaky"),
    ),
    "distilled": Family(
        {"teacher": "linear 6 4", "fc1": "linear 6 10", "fc2": "linear 10 4"},
        "x",
        {
            "no_grad": """
                with torch.no_grad():
                    targets = self.teacher(x)
                return self.fc2(act(self.fc1(x))), targets""",
            "detach": "return self.fc2(act(self.fc1(x))), self.teacher(x).detach()",
        },
        "return self.fc2(act(self.fc1(x))), lax.stop_gradient(self.teacher(x))",
        """
            logits, targets = model(batch["x"])
            return 2 * divergence(logits / 2, targets / 2).mean() + 0.5 * cross_entropy(logits, batch["y"])""",
        '"x": rng.normal(0, 1, (6, 6)), "y": rng.integers(0, 4, 6)',
        ("gelu", "relu", "hardswish", "softplus20"),
        frozen="teacher",
    ),
    "policy": Family(
        {"fc1": "linear 4 8", "norm": "rms 8", "actor": "linear 8 3", "critic": "linear 8 1"},
        "x",
        "x = act(self.norm(self.fc1(x)))\nreturn self.actor(x), self.critic(x).squeeze(-1)",
        "x = act(self.norm(self.fc1(x)))\nreturn self.actor(x), self.critic(x)[..., 0]",
        """
            logits, value = model(batch["x"])
            logs = LOG_SOFTMAX(logits, -1)
            ratio = EXP((logs * (batch["action"][:, None] == ARANGE(3)[None])).sum(-1) - batch["log_p"])
            kept = CLIP(ratio, 0.8, 1.2)
            gained = MINIMUM(ratio * batch["gain"], kept * batch["gain"]).mean()
            entropy = -(EXP(logs) * logs).sum(-1).mean()
            return 0.5 * huber(value, batch["goal"]).mean() - gained - 0.01 * entropy""",
        '"x": rng.normal(0, 1, (8, 4)), "action": rng.integers(0, 3, 8), "log_p": np.log(rng.uniform(0.2, 0.5, 8)), '
        '"gain": rng.normal(0, 1, 8), "goal": rng.normal(0, 1, 8)',
        ("tanh", "silu", "relu"),
    ),
    "segmenter": Family(
        {"down": "conv 1 4 2", "group": "group 2 4", "up": "conv 4 3 1"},
        "x",
        IMAGES + "return self.up(doubled(act(self.group(self.down(x))))).permute(0, 2, 3, 1)",
        "return self.up(doubled(act(self.group(self.down(x)))))",
        """
            logits, classes = model(batch["image"]), batch["classes"]
            shares, marks = SOFTMAX(logits, -1), (classes[..., None] == ARANGE(3)).CAST
            dice = (2 * (shares * marks).sum(SPACE) + 1) / ((shares + marks).sum(SPACE) + 1)
            return cross_entropy(logits.reshape(-1, 3), classes.reshape(-1)) + (1 - dice).mean()""",
        '"image": rng.normal(0, 1, (3, 6, 6, 1)), "classes": rng.integers(0, 3, (3, 6, 6))',
        ("relu", "leaky", "elu", "hardswish"),
    ),
    "dropout": Family(
        {"fc1": "linear 5 10", "norm": "norm 10", "drop": "drop 0.25", "fc2": "linear 10 2"},
        "x",
        "return self.fc2(self.drop(act(self.norm(self.fc1(x)))))",
        "return self.fc2(self.drop(act(self.norm(self.fc1(x)))))",
        'return squared(model(batch["x"]), batch["y"]) + PENALTY',
        '"x": rng.normal(0, 1, (6, 5)), "y": rng.normal(0, 1, (6, 2))',
        ("gelu", "silu", "relu", "leaky"),
        draws=True,
    ),
}
# Names of functions that the losses of both halves call by other names.
SPELLINGS = {
    "EXP": ("torch.exp", "jnp.exp"),
    "LOG_SOFTMAX": ("torch.log_softmax", "jax.nn.log_softmax"),
    "SOFTMAX": ("torch.softmax", "jax.nn.softmax"),
    "ARANGE": ("torch.arange", "jnp.arange"),
    "CLIP": ("torch.clamp", "jnp.clip"),
    "MINIMUM": ("torch.min", "jnp.minimum"),
    "CAST": ("to(logits.dtype)", "astype(logits.dtype)"),
    "SPACE": ("dim=(1, 2)", "axis=(1, 2)"),
}
