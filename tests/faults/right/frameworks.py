"""Layers and modules of both halves, in five frameworks on the JAX side."""

import re
from collections.abc import Iterator, Mapping
from textwrap import dedent, indent

from .families import Family

FRAMEWORKS = ("nnx", "linen", "compact", "equinox", "tree", "haiku")
TREES = ("tree", "haiku")
KEYED = (*TREES, "equinox")  # whose forward pass takes a key if it draws
OWN = ("norm", "rms", "batch")  # kinds that may be classes of the port itself
# Kind -> constructor; {0}, {1} ... are its sizes.
TORCH = {
    "linear": "nn.Linear({0}, {1})",
    "norm": "nn.LayerNorm({0})",
    "rms": "nn.RMSNorm({0}, eps=1e-6)",
    "embed": "nn.Embedding({0}, {1})",
    "conv": "nn.Conv2d({0}, {1}, 3, stride={2}, padding=1)",
    "group": "nn.GroupNorm({0}, {1})",
    "batch": "nn.BatchNorm2d({0})",
    "drop": "nn.Dropout({0})",
    "param": "nn.Parameter(torch.zeros({0}))",
}
NNX = {
    "linear": "nnx.Linear({0}, {1}, rngs=rngs)",
    "norm": "nnx.LayerNorm({0}, epsilon=1e-5, use_fast_variance=False, rngs=rngs)",
    "rms": "nnx.RMSNorm({0}, epsilon=1e-6, use_fast_variance=False, rngs=rngs)",
    "embed": "nnx.Embed({0}, {1}, rngs=rngs)",
    "conv": "nnx.Conv({0}, {1}, (3, 3), strides={2}, padding=1, rngs=rngs)",
    "group": "nnx.GroupNorm({1}, num_groups={0}, epsilon=1e-5, use_fast_variance=False, rngs=rngs)",
    "batch": "layers.BatchNorm({0})",
    "drop": "nnx.Dropout({0}, rngs=rngs)",
    "param": "nnx.Param(jnp.zeros({0}))",
}
LINEN = {
    "linear": "nn.Dense({1})",
    "norm": "nn.LayerNorm(epsilon=1e-5, use_fast_variance=False)",
    "rms": "nn.RMSNorm(epsilon=1e-6, use_fast_variance=False)",
    "embed": "nn.Embed({0}, {1})",
    "conv": "nn.Conv({1}, (3, 3), strides={2}, padding=1)",
    "group": "nn.GroupNorm(num_groups={0}, epsilon=1e-5, use_fast_variance=False)",
    "drop": "nn.Dropout({0}, deterministic=False)",
    "param": 'self.param("NAME", nn.initializers.zeros, ({0},))',
}
EQUINOX = {
    "linear": "eqx.nn.Linear({0}, {1}, key=next(keys))",
    "norm": "eqx.nn.LayerNorm({0})",
    "rms": "eqx.nn.RMSNorm({0}, eps=1e-6, use_bias=False)",
    "embed": "eqx.nn.Embedding({0}, {1}, key=next(keys))",
    "conv": "eqx.nn.Conv2d({0}, {1}, 3, stride={2}, padding=1, key=next(keys))",
    "group": "eqx.nn.GroupNorm({0}, {1})",
    "drop": "eqx.nn.Dropout({0})",
    "param": "jnp.zeros({0})",
}
TREE = {
    "linear": '{{"w": draw(next(keys), {0}, {1}), "b": jnp.zeros({1})}}',
    "norm": '{{"scale": jnp.ones({0}), "offset": jnp.zeros({0})}}',
    "rms": '{{"scale": jnp.ones({0})}}',
    "embed": '{{"embeddings": draw(next(keys), {0}, {1})}}',
    "conv": '{{"w": draw(next(keys), 3, 3, {0}, {1}), "b": jnp.zeros({1})}}',
    "group": '{{"scale": jnp.ones({1}), "offset": jnp.zeros({1})}}',
    "drop": "{{}}",
    "param": "jnp.zeros({0})",
}
# How a layer is called: the text in front of its arguments.
EQUINOX_CALLS = {
    **dict.fromkeys(("linear", "norm", "rms"), "rows(self.NAME, "),
    **dict.fromkeys(("conv", "group"), "images(self.NAME, "),
    "embed": "jnp.take(self.NAME.weight, axis=0, indices=",
    "drop": "self.NAME(key=key, x=",
}
TREE_CALLS = {
    "linear": "linear(PLACE, ",
    "norm": 'normed(scale=PLACE["scale"], offset=PLACE["offset"], x=',
    "rms": 'root(scale=PLACE["scale"], x=',
    "embed": 'jnp.take(PLACE["embeddings"], axis=0, indices=',
    "conv": "conv(PLACE, STRIDE, ",
    "group": "group_norm(PLACE, GROUPS, ",
    "drop": "dropout(key, RATE, ",
}
TABLES = {"nnx": "self.{}.embedding[...]", "compact": "{}.embedding", "equinox": "self.{}.weight"}
# Own layers: classes around the functions `normed` and `root`.
TORCH_OWN = {
    "norm": """
        class Norm(nn.Module):
            def __init__(self, size):
                super().__init__()
                self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

            def forward(self, x):
                return normed(x, self.weight, self.bias)
    """,
    "rms": """
        class Rms(nn.Module):
            def __init__(self, size):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(size))

            def forward(self, x):
                return root(x, self.weight)
    """,
}
MOMENTS = """
    mean, var = x.mean(axis=(0, 1, 2)), jnp.var(x, axis=(0, 1, 2))
    n = x.size // x.shape[-1]
"""
NNX_OWN = {
    "norm": """
        class Norm(nnx.Module):
            def __init__(self, size):
                self.scale, self.bias = nnx.Param(jnp.ones(size)), nnx.Param(jnp.zeros(size))

            def __call__(self, x):
                return normed(x, self.scale[...], self.bias[...])
    """,
    "rms": """
        class Rms(nnx.Module):
            def __init__(self, size):
                self.scale = nnx.Param(jnp.ones(size))

            def __call__(self, x):
                return root(x, self.scale[...])
    """,
    "batch": """
        class Batch(nnx.Module):
            def __init__(self, size):
                self.scale, self.bias = nnx.Param(jnp.ones(size)), nnx.Param(jnp.zeros(size))
                self.mean, self.var = nnx.BatchStat(jnp.zeros(size)), nnx.BatchStat(jnp.ones(size))
                self.use_running_average = False

            def __call__(self, x):
                mean, var = self.mean[...], self.var[...]
                if not self.use_running_average:
                    mean, var, n = x.mean(axis=(0, 1, 2)), jnp.var(x, axis=(0, 1, 2)), x.size // x.shape[-1]
                    self.mean[...] += 0.1 * lax.stop_gradient(mean - self.mean[...])
                    self.var[...] += 0.1 * lax.stop_gradient(var * n / (n - 1) - self.var[...])
                return (x - mean) / jnp.sqrt(var + 1e-5) * self.scale[...] + self.bias[...]
    """,
}
LINEN_OWN = {
    "norm": """
        class Norm(nn.Module):
            @nn.compact
            def __call__(self, x):
                scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
                return normed(x, scale, self.param("bias", nn.initializers.zeros, x.shape[-1:]))
    """,
    "rms": """
        class Rms(nn.Module):
            @nn.compact
            def __call__(self, x):
                return root(x, self.param("scale", nn.initializers.ones, x.shape[-1:]))
    """,
    "batch": """
        class Batch(nn.Module):
            @nn.compact
            def __call__(self, x):
                scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
                bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
                means = self.variable("batch_stats", "mean", jnp.zeros, x.shape[-1:])
                variances = self.variable("batch_stats", "var", jnp.ones, x.shape[-1:])
                mean, var, n = x.mean(axis=(0, 1, 2)), jnp.var(x, axis=(0, 1, 2)), x.size // x.shape[-1]
                if not self.is_initializing():
                    means.value = 0.9 * means.value + 0.1 * mean
                    variances.value = 0.9 * variances.value + 0.1 * var * n / (n - 1)
                return (x - mean) * lax.rsqrt(var + 1e-5) * scale + bias
    """,
}
EQUINOX_OWN = {
    "norm": """
        class Norm(eqx.Module):
            weight: jax.Array
            bias: jax.Array

            def __init__(self, size):
                self.weight, self.bias = jnp.ones(size), jnp.zeros(size)

            def __call__(self, x):
                return normed(x, self.weight, self.bias)
    """,
    "rms": """
        class Rms(eqx.Module):
            weight: jax.Array

            def __init__(self, size):
                self.weight = jnp.ones(size)

            def __call__(self, x):
                return root(x, self.weight)
    """,
}
EQUINOX_HELPERS = {
    "rows(": "def rows(layer, x):\n    "
    "return jax.vmap(layer)(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)\n\n\n",
    "images(": "def images(layer, x):\n    return jnp.moveaxis(jax.vmap(layer)(jnp.moveaxis(x, -1, 1)), 1, -1)\n\n\n",
}
TREE_HELPERS = {
    "linear": {
        "matmul": 'def linear(p, x):\n    return x @ p["w"] + p["b"]',
        "einsum": 'def linear(p, x):\n    return jnp.einsum("...i,ij->...j", x, p["w"]) + p["b"]',
        "dot": 'def linear(p, x):\n    return lax.dot_general(x, p["w"], (((x.ndim - 1,), (0,)), ((), ()))) + p["b"]',
    },
    "conv": {
        "lax": """
            def conv(p, stride, x):
                axes = ("NHWC", "HWIO", "NHWC")
                y = lax.conv_general_dilated(x, p["w"], (stride, stride), ((1, 1), (1, 1)), dimension_numbers=axes)
                return y + p["b"]
        """,
        "shifts": """
            def conv(p, stride, x):
                x, (h, w) = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), x.shape[1:3]
                shifted = [[x[:, i : i + h : stride, j : j + w : stride] for j in range(3)] for i in range(3)]
                return jnp.einsum("ijbhwc,ijcd->bhwd", jnp.array(shifted), p["w"]) + p["b"]
        """,
    },
    "group": {
        "reshape": """
            def group_norm(p, groups, x):
                y = x.reshape(len(x), -1, groups, x.shape[-1] // groups)
                mean, var = y.mean(axis=(1, 3), keepdims=True), jnp.var(y, axis=(1, 3), keepdims=True)
                return ((y - mean) * lax.rsqrt(var + 1e-5)).reshape(x.shape) * p["scale"] + p["offset"]
        """
    },
    "drop": {
        "where": """
            def dropout(key, rate, x):
                return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0.0)
        """,
        "factor": """
            def dropout(key, rate, x):
                return x * jax.random.bernoulli(key, 1 - rate, x.shape).astype(x.dtype) / (1 - rate)
        """,
    },
}
CLASSES = {"norm": "Norm({0})", "rms": "Rms({0})", "batch": "Batch({0})"}
LINEN_CLASSES = {kind: text.replace("{0}", "") for kind, text in CLASSES.items()}


class Net:
    """Text of a family's model in one framework.

    Args:
        family: the program.
        framework: "torch", or one of `FRAMEWORKS`.
        own: kinds of layers that are classes of the port itself.
        helpers: kind of a tree's layer -> style of the function that applies it.
        body: of the forward pass.
    """

    def __init__(self, family: Family, framework: str, own: frozenset[str], helpers: Mapping[str, str], body: str):
        self._family, self._framework, self._own, self._helpers = family, framework, own, helpers
        self._layers = {name: text.split() for name, text in family.layers.items()}
        self._body = dedent(body).strip()

    def written(self) -> str:
        """Return classes and functions up to the one that makes the model."""
        return getattr(self, f"_{self._framework}")()

    def loss(self, body: str) -> str:
        """Return the loss's body, with the model called as this framework does."""
        key = "key, " * (self._family.draws and self._framework in KEYED)
        return body.replace("model(", f"net(model, {key}" if self._framework in TREES else f"model({key}")

    def _classes(self, own: Mapping[str, str]) -> str:
        kinds = sorted({kind for kind, *_ in self._layers.values()} & self._own & own.keys())
        return "".join(f"{dedent(own[kind]).strip()}\n\n\n" for kind in kinds)

    def _made(self, table: Mapping[str, str], classes: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        table = {**table, **{kind: classes[kind] for kind in self._own & classes.keys()}}
        for name, (kind, *sizes) in self._layers.items():
            yield name, table[kind].format(*sizes).replace("NAME", name)

    def _called(self, calls: Mapping[str, str], layer: str) -> str:
        """Return the body, with layers called by the kind's text, or by `layer`, the text of one."""

        def call(match: re.Match[str]) -> str:
            name = match[1]
            kind, *sizes = self._layers[name]
            place = layer.format(name)
            if not match[2]:
                return place
            text = f"{place}(" if kind in self._own and self._framework == "equinox" else calls.get(kind, f"{place}(")
            text = text.replace("STRIDE", sizes[-1]).replace("GROUPS", sizes[0]).replace("RATE", sizes[0])
            return text.replace("self.NAME", place).replace("PLACE", place)

        return re.sub(r"self\.(\w+)(\(?)", call, self._body)

    def _with_tables(self, body: str, table: str) -> str:
        return re.sub(r"TABLE\((\w+)\)", lambda match: table.format(match[1]), body)

    def _torch(self) -> str:
        made = "\n".join(f"self.{name} = {text}" for name, text in self._made(TORCH, CLASSES))
        body = self._with_tables(self._body, "self.{}.weight")
        frozen = self._family.frozen
        rest = (
            f"    model = Net()\n    model.{frozen}.requires_grad_(False)\n    return model"
            if frozen
            else "    return Net()"
        )
        return (
            f"{self._classes(TORCH_OWN)}class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            f"{indent(made, ' ' * 8)}\n\n"
            f"    def forward(self, {self._family.arguments}):\n{indent(body, ' ' * 8)}\n\n\n"
            f"def torch_model():\n{rest}\n"
        )

    def _nnx(self) -> str:
        made = "\n".join(f"self.{name} = {text}" for name, text in self._made(NNX, CLASSES))
        made += "\nself.rngs = rngs" if "KEY" in self._body else ""
        body = self._body.replace("KEY", "self.rngs.noise()")
        for name, (kind, *_) in self._layers.items():
            body = re.sub(rf"self\.{name}\b", f"self.{name}[...]", body) if kind == "param" else body
        body = self._with_tables(body, TABLES["nnx"])
        return (
            f"{self._classes(NNX_OWN)}class Net(nnx.Module):\n"
            f"    def __init__(self, rngs):\n{indent(made, ' ' * 8)}\n\n"
            f"    def __call__(self, {self._family.arguments}):\n{indent(body, ' ' * 8)}\n\n\n"
            "def jax_model():\n    return Net(nnx.Rngs(0))\n"
        )

    def _linen(self) -> str:
        made = "\n".join(f"self.{name} = {text}" for name, text in self._made(LINEN, LINEN_CLASSES))
        body = self._with_tables(self._body, "self.{}.embedding").replace("KEY", 'self.make_rng("noise")')
        return (
            f"{self._classes(LINEN_OWN)}class Net(nn.Module):\n    def setup(self):\n{indent(made, ' ' * 8)}\n\n"
            f"    def __call__(self, {self._family.arguments}):\n{indent(body, ' ' * 8)}\n\n\n"
            "def jax_model():\n    return Net()\n"
        )

    def _compact(self) -> str:
        named = (
            (name, text, text[:-1] + (", " if text[-2] != "(" else "") + f'name="{name}")')
            for name, text in self._made(LINEN, LINEN_CLASSES)
        )
        made = "\n".join(f"{name} = {text if 'self.param' in text else with_name}" for name, text, with_name in named)
        body = self._with_tables(self._called({}, "{}"), TABLES["compact"]).replace("KEY", 'self.make_rng("noise")')
        return (
            f"{self._classes(LINEN_OWN)}class Net(nn.Module):\n    @nn.compact\n"
            f"    def __call__(self, {self._family.arguments}):\n{indent(made + chr(10) + body, ' ' * 8)}\n\n\n"
            "def jax_model():\n    return Net()\n"
        )

    def _equinox(self) -> str:
        made = [*self._made(EQUINOX, CLASSES)]
        fields = "\n".join(
            f"{name}: {text.partition('(')[0] if text[0] != 'j' else 'jax.Array'}" for name, text in made
        )
        lines = "\n".join(f"self.{name} = {text}" for name, text in made)
        body = self._with_tables(self._called(EQUINOX_CALLS, "self.{}"), TABLES["equinox"]).replace("KEY", "key")
        key = "key, " * self._family.draws
        helpers = "".join(text for name, text in EQUINOX_HELPERS.items() if name in body)
        return (
            f"{helpers}{self._classes(EQUINOX_OWN)}class Net(eqx.Module):\n{indent(fields, ' ' * 4)}\n\n"
            f"    def __init__(self, keys):\n{indent(lines, ' ' * 8)}\n\n"
            f"    def __call__(self, {key}{self._family.arguments}):\n{indent(body, ' ' * 8)}\n\n\n"
            "def jax_model():\n    return Net(iter(jax.random.split(jax.random.key(0), 20)))\n"
        )

    def _tree(self, prefix: str = "") -> str:
        place = f'params["{prefix}{{}}"]'
        made = "\n".join(f'"{prefix}{name}": {text},' for name, text in self._made(TREE, {}) if text != "{}")
        body = self._with_tables(self._called(TREE_CALLS, place), f'{place}["embeddings"]').replace("KEY", "key")
        kinds = {kind for kind, *_ in self._layers.values()} & TREE_HELPERS.keys()
        helpers = "".join(f"{dedent(TREE_HELPERS[k][self._helpers[k]]).strip()}\n\n\n" for k in sorted(kinds))
        key = "key, " * self._family.draws
        return (
            f"{helpers}def draw(key, *shape):\n    return jax.random.normal(key, shape) / np.sqrt(shape[-2])\n\n\n"
            f"def net(params, {key}{self._family.arguments}):\n{indent(body, ' ' * 4)}\n\n\n"
            f"def jax_model():\n    keys = iter(jax.random.split(jax.random.key(0), 20))\n    return {{\n"
            f"{indent(made, ' ' * 8)}\n    }}\n"
        )

    def _haiku(self) -> str:
        return self._tree("net/~/")
