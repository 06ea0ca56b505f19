"""A port: a PyTorch training loop and its translation into JAX.

A program is plain Python whose top-level names are the fields of `Port`:

    def torch_model(): return TorchNet()
    def jax_model(): return FlaxNet(nnx.Rngs(0))
    def torch_loss(model, batch): return F.cross_entropy(model(batch["x"]), batch["y"])
    def jax_loss(model, batch): return softmax_cross_entropy(model(batch["x"]), batch["y"]).mean()
    def torch_optimizer(parameters): return torch.optim.AdamW(parameters, lr=1e-3)
    jax_optimizer = optax.adamw(1e-3, weight_decay=1e-2)
    def batch(step, rank): return {"x": ..., "y": ...}

This package imports neither framework.
"""

from jaxddp.parity.port.loading import FileError, PortFile, PortSource, load_port
from jaxddp.parity.port.port import Facts, Port
from jaxddp.parity.port.rules import Names, Rule, flattened, fused, part, summed, transposed
from jaxddp.scripts import errors_located

__all__ = [
    "Facts",
    "FileError",
    "Names",
    "Port",
    "PortFile",
    "PortSource",
    "Rule",
    "errors_located",
    "flattened",
    "fused",
    "load_port",
    "part",
    "summed",
    "transposed",
]
