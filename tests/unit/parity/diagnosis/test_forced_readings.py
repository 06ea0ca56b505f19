"""Faults that the code of both sides says, where trials would say less: other types, and other operators."""

from collections.abc import Callable, Mapping

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from torch import Tensor, nn
from torch.nn import functional as F

from jaxddp.parity.diagnosis.forced.causes import LocatedFault
from jaxddp.parity.report.sentences import line, sentence
from tests.support.forced_programs import Arrays, faults_of

ROWS, WIDTH, CLASSES = 4, 5, 3


class Classifier(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)


def torch_loss(model: Classifier, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    gate = 1 - torch.sigmoid(batch["x"])
    logits = model.head(torch.tanh(model.first(batch["x"])) * gate)
    margin = torch.relu(0.3 + logits.topk(2).values.mean(-1)).mean()
    return {"loss": F.cross_entropy(logits, batch["y"]) + 0.5 * margin}


def dense(p: Arrays, x: jax.Array, layer: str = "first") -> jax.Array:
    return x @ p[f"{layer}.weight"].T + p[f"{layer}.bias"][None]


def faults(
    first: Callable[[Arrays, jax.Array], jax.Array] = dense,
    gate: Callable[[jax.Array], jax.Array] = lambda x: 1 - jax.nn.sigmoid(x),
    hinge: Callable[[jax.Array], jax.Array] = lambda logits: 0.3 + jax.lax.top_k(logits, 2)[0].mean(-1),
) -> list[LocatedFault]:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(ROWS, WIDTH)), "y": rng.integers(0, CLASSES, ROWS)}

    def jax_loss(p: Arrays, batch: Arrays) -> jax.Array:
        logits = dense(p, jnp.tanh(first(p, batch["x"])) * gate(batch["x"]), "head")
        margin = jnp.maximum(hinge(logits), 0).mean()
        return 0.5 * margin - jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1).mean()

    return faults_of(Classifier().double(), torch_loss, jax_loss, batch)


def said(fault: LocatedFault) -> str:
    return line(fault.names[0]) if fault.names else sentence(fault.what) if fault.what else ""


def rounded(dtype: str, factor: float = 1.0) -> Callable[[Arrays, jax.Array], jax.Array]:
    """Return a layer that is computed in a type of few bits."""

    def layer(p: Arrays, x: jax.Array) -> jax.Array:
        narrow = {name: array.astype(dtype) for name, array in p.items()}
        return factor * dense(narrow, x.astype(dtype)).astype(x.dtype)

    return layer


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_layer_that_is_computed_in_few_bits_is_named(dtype: str) -> None:
    [fault] = faults(first=rounded(dtype))
    assert fault.kind == "few_bits"
    assert said(fault) == f"linear(x, first.weight, first.bias) is computed in {dtype}"


def test_a_layer_that_is_off_by_more_than_rounding_is_not_named_so() -> None:
    [fault] = faults(first=rounded("bfloat16", factor=1.1))
    assert fault.kind != "few_bits"


def test_another_operator_is_said_where_a_factor_would_do_the_same() -> None:
    [fault] = faults(gate=lambda x: 1 + jax.nn.sigmoid(x))
    assert said(fault).startswith("add instead of sub")


def test_a_term_that_is_0_in_the_port_is_found_where_it_becomes_0() -> None:
    [fault] = faults(hinge=lambda logits: -1.0 - jnp.square(logits).sum(-1))
    assert fault.text.lines.jax is not None
    assert fault.text.lines.jax.text.startswith("margin = jnp.maximum(hinge(logits), 0)")


def mixing_loss(model: Classifier, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parts = model.first(batch["x"])[:, :4].chunk(2, dim=-1)
    key, value = (part.view(ROWS, 1, 2).transpose(1, 2) for part in parts)
    mixed = torch.tanh(value)
    return {"loss": key.square().mean() + mixed.mean() + model.head.weight.sum() * model.head.bias.sum()}


def test_another_operand_is_quoted_where_the_port_uses_it() -> None:
    def jax_loss(p: Arrays, batch: Arrays) -> jax.Array:
        key, _ = (part.reshape(ROWS, 1, 2) for part in jnp.split(dense(p, batch["x"])[:, :4], 2, axis=-1))
        mixed = jnp.tanh(key)
        return jnp.square(key).mean() + mixed.mean() + p["head.weight"].sum() * p["head.bias"].sum()

    torch.manual_seed(0)
    batch = {"x": np.random.default_rng(0).normal(size=(ROWS, WIDTH))}
    [fault] = faults_of(Classifier().double(), mixing_loss, jax_loss, batch)
    assert fault.kind == "other_operand" and fault.text.lines.jax is not None
    assert fault.text.lines.jax.text == "mixed = jnp.tanh(key)"


class Attention(nn.Module):
    """Scores of queries by keys, as many as each other."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


def torch_loss_of_attention(model: Attention, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    scores = model.query(batch["x"]) @ model.key(batch["x"]).transpose(-1, -2)
    weights = scores.masked_fill(batch["hidden"].bool(), -torch.inf).softmax(-1)
    return {"loss": (weights @ batch["x"]).square().mean()}


@pytest.mark.parametrize("form", ["qd,kd->qk", "qd,kd->kq"])
def test_scores_of_keys_by_queries_are_named_where_they_are_made(form: str) -> None:
    torch.manual_seed(0)
    batch = {"x": np.random.default_rng(0).normal(size=(ROWS, WIDTH)), "hidden": np.triu(np.ones((ROWS, ROWS)), 1)}

    def jax_loss(p: Arrays, batch: Arrays) -> jax.Array:
        query, key = (dense(p, batch["x"], layer) for layer in ("query", "key"))
        scores = jnp.einsum(form, query, key)
        weights = jax.nn.softmax(jnp.where(batch["hidden"] > 0, -jnp.inf, scores), axis=-1)
        return jnp.square(weights @ batch["x"]).mean()

    found = faults_of(Attention().double(), torch_loss_of_attention, jax_loss, batch)
    if form.endswith("qk"):
        assert found == []
        return
    [fault] = found
    assert said(fault) == "axes 0 and 1 of scores exchanged before masked_fill"
    assert fault.text.lines.jax is not None and "jnp.einsum" in fault.text.lines.jax.text
