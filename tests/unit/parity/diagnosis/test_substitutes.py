"""Edits of positions, masks, axes and expressions are named with their operands, from where the programs part."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from torch import Tensor, nn
from torch.nn import functional as F

from jaxddp.parity.diagnosis.forward.loss_causes import search_model
from jaxddp.parity.report.sentences import line
from tests.support.read_programs import evidence_between, linear, norm

CLEAN = 1e-14  # measured: up to 4e-16
TOKENS, LENGTH, WIDTH, CLASSES, EXAMPLES = 9, 6, 4, 3, 5
WEIGHTS, BOUND = (1.0, 2.0, 0.5), 2.0
Params = Mapping[str, jax.Array]
Batch = Mapping[str, jax.Array]


class Tagger(nn.Module):
    """Embeddings and positions, attention to valid tokens with a residual, a mean over them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.kinds = nn.Embedding(TOKENS, WIDTH), nn.Embedding(2, WIDTH)
        self.norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, kinds: Tensor, valid: Tensor) -> Tensor:
        rates = 0.5 ** torch.arange(WIDTH // 2, dtype=torch.float64)
        angles = torch.arange(tokens.shape[1], dtype=torch.float64)[:, None] * rates
        x = self.tokens(tokens) + self.kinds(kinds) + torch.cat([angles.sin(), angles.cos()], dim=-1)
        x = self.norm(x)
        x = x + F.scaled_dot_product_attention(x, x, x, attn_mask=valid[:, None])
        mean = (x * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)
        return self.fc(mean) * mean.pow(2).mean(-1, keepdim=True).exp().clamp(min=BOUND)


def torch_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    logits = model(batch["tokens"], batch["kinds"], batch["valid"])
    loss = F.cross_entropy(logits, batch["label"], weight=logits.new_tensor(WEIGHTS))
    return {"loss": loss, "count": torch.tensor(1.0)}


def masked_mean(x: jax.Array, valid: jax.Array) -> jax.Array:
    return (x * valid[..., None]).sum(1) / valid.sum(1, keepdims=True)


@dataclass(frozen=True)
class Pieces:
    """Pieces of the loss in jax; the defaults are torch's."""

    first: int = 0
    kinds: Callable[[jax.Array], jax.Array] = lambda kinds: kinds
    waves: Callable[[jax.Array, jax.Array], list[jax.Array]] = lambda sines, cosines: [sines, cosines]
    axes: tuple[int, ...] = (-1,)
    hidden: float = -jnp.inf
    pooled: Callable[[jax.Array, jax.Array], jax.Array] = masked_mean
    power: Callable[[jax.Array], jax.Array] = jnp.square
    raised: Callable[[jax.Array], jax.Array] = lambda x: jnp.maximum(jnp.exp(x), BOUND)
    weights: tuple[float, ...] = WEIGHTS
    divisor: Callable[[jax.Array], Any] = jnp.sum

    @jax.numpy_rank_promotion("allow")
    def loss(self, params: Params, batch: Batch) -> jax.Array:
        """Return the loss."""
        tokens, kinds, valid = (batch[name] for name in ("tokens", "kinds", "valid"))
        places = jnp.arange(self.first, tokens.shape[1] + self.first)
        angles = places[:, None] * 0.5 ** jnp.arange(WIDTH // 2)[None]
        waves = jnp.concatenate(self.waves(jnp.sin(angles), jnp.cos(angles)), axis=-1)
        x = params["tokens.weight"][tokens] + params["kinds.weight"][self.kinds(kinds)] + waves[None]
        x = norm(params, x, 1e-5, self.axes)
        scores = jnp.where(valid[:, None], x @ x.swapaxes(1, 2) / jnp.sqrt(WIDTH), self.hidden)
        x = x + jax.nn.softmax(scores) @ x
        mean = self.pooled(x, valid)
        raised = self.raised(self.power(mean).mean(-1, keepdims=True))
        logits = linear(params, "fc", mean) * raised
        weights = jnp.array(self.weights)[batch["label"]]
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], 1)[:, 0]
        return (weights * losses).sum() / self.divisor(weights)


# Pieces of the port, name of the fault, what is said.
CASES = {
    "positions": (Pieces(first=1), "number", "arange starts at 1 instead of 0 in the model (call 2)"),
    "rows": (Pieces(kinds=jnp.zeros_like), "other_index", "embedding takes row 0 for every index in kinds"),
    "waves": (
        Pieces(waves=lambda sines, cosines: [cosines, sines]),
        "other_order",
        "cat in the order the result of cos, the result of sin",
    ),
    "axes": (Pieces(axes=(-2, -1)), "other_axis", "layer_norm over the axes 1 and 2 instead of 2 in norm"),
    "hidden": (Pieces(hidden=-5.0), "number", "value of masked_fill of the scores -5, the reference has -inf"),
    "no mask": (
        Pieces(pooled=lambda x, valid: x.mean(1)),
        "other_expression",
        "the mean of the result of add over axis 1, all elements (6 in number), in place of the result of div",
    ),
    "length": (
        Pieces(pooled=lambda x, valid: (x * valid[..., None]).sum(1) / valid.shape[1]),
        "other_expression",
        "the result of sum divided by 6 instead of by the result of sum",
    ),
    "power": (Pieces(power=jnp.abs), "other_function", "abs instead of pow"),
    "function": (
        Pieces(raised=lambda x: jnp.maximum(jax.nn.softplus(x), BOUND)),
        "other_function",
        "softplus instead of exp",
    ),
    "bound": (
        Pieces(raised=lambda x: jnp.maximum(jnp.exp(x).mean(0, keepdims=True), BOUND)),
        "other_expression",
        "fc(...) * maximum((sum(exp(...)) / 5), 2) instead of fc(...) * clamp(exp(...), min=2), in cross_entropy",
    ),
    "weights": (
        Pieces(weights=(1.0, 4.0, 0.25)),
        "call_added",
        "the square of weight before cross_entropy",
    ),
    "count": (
        Pieces(divisor=len),
        "other_expression",
        "cross_entropy divides by the number of labels instead of by the sum of their weights",
    ),
}


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, LENGTH + 1, (2, EXAMPLES))
    return [
        {
            "tokens": rng.integers(0, TOKENS, (EXAMPLES, LENGTH)),
            "kinds": rng.integers(0, 2, (EXAMPLES, LENGTH)),
            "valid": np.arange(LENGTH) < of_step[:, None],
            "label": rng.integers(0, CLASSES, EXAMPLES),
        }
        for of_step in lengths
    ]


def evidence(pieces: Pieces) -> Any:
    torch.manual_seed(0)
    return evidence_between(Tagger().double(), torch_loss, pieces.loss, batches())


@pytest.mark.one_in(6)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a hypothesis may overflow
@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_named_with_its_operands(case: str) -> None:
    pieces, fault, says = CASES[case]
    ruling, _ = search_model(evidence(pieces))
    [named] = ruling.named
    assert (named.faults, line(named)) == ((fault,), says)
    assert named.residual <= CLEAN


def test_a_correct_port_has_no_cause() -> None:
    ruling, named = search_model(evidence(Pieces()))
    assert not ruling.named and ruling.runner_up is None and not named


def test_targets_two_ahead_are_named() -> None:
    def of_torch(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        logits, targets = model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()), "count": torch.tensor(1.0)}

    def of_jax(params: Params, batch: Batch) -> jax.Array:
        scores = jax.nn.log_softmax(params["0.weight"][batch["tokens"][:, :-2]] @ params["1.weight"].T)
        return -jnp.take_along_axis(scores, batch["tokens"][:, 2:, None], -1).mean()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)).double()
    steps = [{"tokens": of_step["tokens"]} for of_step in batches()]
    ruling, _ = search_model(evidence_between(model, of_torch, of_jax, steps))
    assert [line(named) for named in ruling.named] == ["slices of tokens shifted by 2 instead of 1"]
