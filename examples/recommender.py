"""DLRM (Naumov et al. 2019) on a log of clicks, in Flax and in PyTorch, with the names of Meta's code.

    jaxddp train examples/recommender.py --output runs/jax        # 4 s
    python -m torch_ref.train examples/recommender.py --output runs/torch   # 2 s

Both end with train loss 0.436022, test loss 0.505480 and accuracy 0.7574 (two CPU cores, 2026-11-25). With
`--dtype float64` their losses of each epoch are equal to 1e-15, and `jaxddp check` says equal. Criteo's
Kaggle clicks on the 8 GPUs of a node, or the same after `torchrun --nproc-per-node 8 -m torch_ref.train`:

    jaxddp train examples/recommender.py --log kaggleAdDisplayChallenge_processed.npz --features 16 \
        --bottom 512 256 64 --top 512 256 --global-batch-size 2048 --epochs 1 --output runs/criteo
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
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

epochs, global_batch_size, optimizer, lr = 3, 128, "adagrad", 0.02
DENSE, MADE = 13, (3, 1000, 20, 200, 50, 500, 7, 100)  # dense features of Criteo's logs; rows of the tables made here


@dataclass
class Options:
    log: str | None = None
    """File of Criteo's clicks as DLRM's preprocessing writes it: X_int, X_cat, y, counts. None: clicks made here."""
    features: int = 8
    """Width of an embedding."""
    bottom: tuple[int, ...] = (64, 32)
    """Widths of the layers before the interactions."""
    top: tuple[int, ...] = (64, 32)
    """Widths of the layers after them."""


@lru_cache(maxsize=1)
def clicks(path: str | None) -> dict[str, np.ndarray]:
    """Return counts (N, 13), categories (N, tables), clicks (N,) and the tables' numbers of rows."""
    if path is not None:
        return dict(np.load(path))
    rng = np.random.default_rng(0)
    counts = rng.poisson(rng.gamma(1, 5, (24_000, DENSE)))
    rows = (rng.random((24_000, len(MADE))) ** 2 * MADE).astype(np.int64)  # low numbers are popular
    tastes = np.stack([rng.normal(0, 0.3, (size, 4))[column] for size, column in zip(MADE, rows.T, strict=True)])
    logit = tastes.sum((0, 2)) + (tastes.sum(0) ** 2 - (tastes**2).sum(0)).sum(-1) + np.log1p(counts[:, :3]).sum(-1) - 5
    return {
        "X_int": counts,
        "X_cat": rows,
        "y": rng.random(24_000) < 1 / (1 + np.exp(-logit)),
        "counts": np.array(MADE),
    }


def part(options: Options, which: slice) -> dict[str, np.ndarray]:
    log = clicks(options.log)
    counts, rows, clicked = (log[name][which] for name in ("X_int", "X_cat", "y"))
    return {"dense": np.log1p(counts).astype("f4"), "rows": rows.astype("i4"), "clicked": clicked.astype("f4")}


def train_data(options: Options) -> dict[str, np.ndarray]:
    return part(options, slice(len(clicks(options.log)["y"]) * 6 // 7))  # six days of a week


def test_data(options: Options) -> dict[str, np.ndarray]:
    return part(options, slice(len(clicks(options.log)["y"]) * 6 // 7, None))


def tables(options: Options) -> list[np.ndarray]:
    """Draw the initial tables, the same for both sides; linear layers have torch's initial weights."""
    rng, sizes = np.random.default_rng(0), clicks(options.log)["counts"]
    return [rng.uniform(-1, 1, (size, options.features)).astype("f4") / np.sqrt(size, dtype="f4") for size in sizes]


def widths(options: Options) -> tuple[list[int], list[int]]:
    """Return the widths of both networks; each pair of the dense vector and the rows has one product."""
    vectors = 1 + len(clicks(options.log)["counts"])
    pairs = vectors * (vectors - 1) // 2
    return [DENSE, *options.bottom, options.features], [options.features + pairs, *options.top, 1]


def predict(model: Any, batch: dict[str, Any]) -> Any:
    return model(batch["dense"], batch["rows"])


def metrics(logits: Any, batch: dict[str, Any]) -> dict[str, Any]:
    return {"accuracy": (logits > 0) == (batch["clicked"] > 0)}


def torch_layers(widths: Sequence[int]) -> nn.Sequential:
    each = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*each[:-1])


class TorchDLRM(nn.Module):
    def __init__(self, options: Options):
        super().__init__()
        self.bot_l, self.top_l = map(torch_layers, widths(options))
        made = (nn.Embedding.from_pretrained(torch.tensor(table), freeze=False) for table in tables(options))
        self.emb_l = nn.ModuleList(made)

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        x = self.bot_l(dense)
        vectors = torch.stack([x, *(table(column) for table, column in zip(self.emb_l, rows.T, strict=True))], 1)
        left, right = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1)
        products = (vectors @ vectors.mT)[:, left, right]
        return self.top_l(torch.cat([x, products], 1))[:, 0]


def torch_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(predict(model, batch), batch["clicked"], reduction="none")


def flax_layers(widths: Sequence[int], generator: Generator) -> nnx.Sequential:
    each = [layer for i, o in pairwise(widths) for layer in (layers.Linear(i, o, generator=generator), nnx.relu)]
    return nnx.Sequential(*each[:-1])


class DLRM(nnx.Module):
    def __init__(self, options: Options, config: TrainConfig):
        self.bot_l, self.top_l = map(partial(flax_layers, generator=Generator(config.seed)), widths(options))
        self.emb_l = nnx.List([nnx.Dict(embedding=nnx.Param(jnp.asarray(table))) for table in tables(options)])

    def __call__(self, dense: jax.Array, rows: jax.Array) -> jax.Array:
        x = self.bot_l(dense)
        vectors = jnp.stack(
            [x, *(table.embedding[column] for table, column in zip(self.emb_l, rows.T, strict=True))], 1
        )
        left, right = np.tril_indices(vectors.shape[1], -1)
        products = (vectors @ vectors.mT)[:, left, right]
        return self.top_l(jnp.concatenate([x, products], 1))[:, 0]


def jax_loss(model: nnx.Module, batch: dict[str, jax.Array]) -> jax.Array:
    return optax.sigmoid_binary_cross_entropy(predict(model, batch), batch["clicked"])


torch_model, jax_model = TorchDLRM, DLRM
names = {"bot_l.layers": "bot_l", "top_l.layers": "top_l"}
