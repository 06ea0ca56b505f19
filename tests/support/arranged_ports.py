"""Correct ports, as text, whose jax arrays are not one torch tensor each; tests plant faults by replacing pieces."""

from pathlib import Path

from tests.support import small_port
from tests.support.small_port import Change, replaced

# Both models are made of torch's and jax's blocks below.
ENDS = """
def torch_model():
    return TorchNet()

def torch_loss(model, batch):
    y = model(batch["x"])
    return F.cross_entropy(y.reshape(-1, y.shape[-1]), batch["y"].flatten())

def jax_loss(model, batch):
    from optax import softmax_cross_entropy_with_integer_labels as cross_entropy
    return cross_entropy(model(batch["x"]), batch["y"]).mean()

optimizer = "adam"
"""

# A compact linen decoder: nn.scan over the blocks, and q, k and v beside torch's one c_attn.
SCANNED = """
import numpy as np
import torch
from torch.nn import functional as F

E, H, T, V, L = 8, 2, 5, 11, 3

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = torch.nn.LayerNorm(E)
        self.c_attn = torch.nn.Linear(E, 3 * E)
        self.c_proj = torch.nn.Linear(E, E)
        self.ln_2 = torch.nn.LayerNorm(E)
        self.up = torch.nn.Linear(E, 4 * E)
        self.down = torch.nn.Linear(4 * E, E)
    def forward(self, x):
        q, k, v = (y.view(*y.shape[:2], H, -1).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).split(E, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))

class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = torch.nn.Embedding(V, E)
        self.wpe = torch.nn.Parameter(torch.randn(T, E))
        self.h = torch.nn.ModuleList([Block() for _ in range(L)])
        self.ln_f = torch.nn.LayerNorm(E)
    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.T

def jax_model():
    import jax
    from flax import linen
    from jax import numpy as jnp
    class FlaxBlock(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            y = linen.LayerNorm(epsilon=1e-5)(x)
            q, k, v = (linen.Dense(E)(y).reshape(*x.shape[:2], H, -1) for _ in range(3))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (E // H) ** 0.5
            scores = jnp.where(jnp.tril(jnp.ones((T, T), bool))[None, None], scores, -jnp.inf)
            y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)
            x = x + linen.Dense(E)(y)
            y = linen.Dense(4 * E)(linen.LayerNorm(epsilon=1e-5)(x))
            return x + linen.Dense(E)(jax.nn.gelu(y, approximate=False)), None
    class FlaxNet(linen.Module):
        @linen.compact
        def __call__(self, tokens):
            embed = linen.Embed(V, E)
            x = embed(tokens) + self.param("position", linen.initializers.normal(1.0), (1, T, E))
            scan = linen.scan(FlaxBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=L)
            x, _ = scan(name="blocks")(x, None)
            return embed.attend(linen.LayerNorm(epsilon=1e-5)(x))
    return FlaxNet()

def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    return {"x": rng.integers(0, V, (4, T)), "y": rng.integers(0, V, (4, T))}
"""

# One attention layer, in whose place SPLIT, BY_HEAD and JOINT put their layers.
ATTENTION = """
import numpy as np
import torch
from torch.nn import functional as F

E, H, T, C = 8, 2, 5, 4

class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = H
        TORCH_LAYERS
        self.out = torch.nn.Linear(E, E)
        self.head = torch.nn.Linear(E, C)
    def forward(self, x):
        q, k, v = (y.transpose(1, 2) for y in TORCH_CALL)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return self.head(F.gelu(self.out(y)))

def jax_model():
    import jax
    from flax import nnx
    from jax import numpy as jnp
    class FlaxNet(nnx.Module):
        def __init__(self, rngs):
            FLAX_LAYERS
            self.out = nnx.Linear(E, E, rngs=rngs)
            self.head = nnx.Linear(E, C, rngs=rngs)
        def __call__(self, x):
            q, k, v = (y.reshape(*x.shape[:2], H, -1) for y in FLAX_CALL)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (E // H) ** 0.5
            y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)
            return self.head(jax.nn.gelu(self.out(y), approximate=False))
    return FlaxNet(nnx.Rngs(0))

def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    return {"x": rng.normal(1, 1, (4, T, E)), "y": rng.integers(0, C, (4, T))}
"""
SEPARATE_FLAX = {
    "FLAX_LAYERS": "self.q, self.k, self.v = (nnx.Linear(E, E, rngs=rngs) for _ in range(3))",
    "FLAX_CALL": "(self.q(x), self.k(x), self.v(x))",
}
FUSED_TORCH = {"TORCH_LAYERS": "self.qkv = torch.nn.Linear(E, 3 * E)"}
# torch's qkv against q, k and v; the same, where torch's outputs are (heads, 3, head_dim); and the reverse.
SPLIT = FUSED_TORCH | SEPARATE_FLAX | {"TORCH_CALL": "self.qkv(x).view(len(x), T, 3, H, -1).unbind(2)"}
BY_HEAD = FUSED_TORCH | SEPARATE_FLAX | {"TORCH_CALL": "self.qkv(x).view(len(x), T, H, 3, -1).unbind(3)"}
JOINT = {
    "TORCH_LAYERS": "self.q, self.k, self.v = (torch.nn.Linear(E, E) for _ in range(3))",
    "TORCH_CALL": "(f(x).view(len(x), T, H, -1) for f in (self.q, self.k, self.v))",
    "FLAX_LAYERS": "self.qkv = nnx.Linear(E, 3 * E, rngs=rngs)",
    "FLAX_CALL": "jnp.split(self.qkv(x), 3, axis=-1)",
}

# torch flattens (C, H, W), jax (H, W, C).
CONVNET = """
import numpy as np
import torch
from torch.nn import functional as F

class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 3, 3)
        self.fc1 = torch.nn.Linear(18, 6)
        self.fc2 = torch.nn.Linear(6, 4)
    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(torch.relu(self.conv(x)).flatten(1))))

def jax_model():
    import jax
    from flax import nnx
    class FlaxNet(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(2, 3, (3, 3), padding="VALID", rngs=rngs)
            self.fc1 = nnx.Linear(18, 6, rngs=rngs)
            self.fc2 = nnx.Linear(6, 4, rngs=rngs)
        def __call__(self, x):
            x = nnx.relu(self.conv(x.transpose(0, 2, 3, 1)))
            return self.fc2(jax.nn.gelu(self.fc1(x.reshape(len(x), -1)), approximate=False))
    return FlaxNet(nnx.Rngs(0))

def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    return {"x": rng.normal(1, 1, (8, 2, 4, 5)), "y": rng.integers(0, 4, 8)}
"""
TANH: Change = ("approximate=False", "approximate=True")  # a planted fault


def attention(layers: dict[str, str]) -> str:
    """Return the port of one attention layer with these layers."""
    return replaced(ATTENTION, *layers.items())


def write(folder: Path, text: str, *changes: Change) -> Path:
    """Write a port with pieces replaced; return the path."""
    return small_port.write(folder, *changes, more=ENDS, text=text)
