"""LlamaForSequenceClassification against transformers: logits, loss, gradients in float64, logits in 16 bits."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp

from examples.arrays import distance
from jaxddp.data.torch_rng import Generator
from jaxddp.models import llama
from jaxddp.models.llama_config import LlamaConfig
from jaxddp.nn.autocast import autocast
from jaxddp.nn.functional import cast
from jaxddp.nn.torch_weights import from_torch, to_torch
from jaxddp.state import Params
from tests.support.llama_cases import (
    LENGTHS,
    TINY,
    batch,
    distances,
    functional,
    logits_of,
    ours,
    params_of,
    their_classifier,
    theirs,
)
from tests.support.llama_in_float64 import in_float64

# Largest distances in float64, relative to an array's largest value, with the measured ones beside them.
TOLERANCE = 1e-13  # 4.5e-15
TOLERANCE_135M = 1e-12  # at full size: 1e-13 (a gradient; logits 2e-14, weights after two steps 9e-15)
FAULT = 0.05  # smallest distance of logits with a planted fault: 0.2


@pytest.fixture(scope="module")
def their_model() -> Any:
    return their_classifier()


@pytest.fixture
def reference(their_model: Any) -> Any:
    """Copy of `their_model` that computes in float64 throughout."""
    return in_float64(their_classifier(like=their_model))


@pytest.mark.parametrize("padding", ["right", "left"])
def test_logits_loss_and_gradients_equal_those_of_transformers(x64: None, reference: Any, padding: str) -> None:
    expected = theirs(reference, batch(padding))
    actual = ours(params_of(reference), batch(padding))
    assert max(distances(actual, expected).values()) < TOLERANCE
    assert not actual["model.embed_tokens.weight"][TINY.pad_token_id].any()  # although a text contains it


def test_the_row_of_the_padding_alone_begins_with_0_as_in_transformers(their_model: Any) -> None:
    of_theirs = their_model.model.embed_tokens.weight.detach().numpy()
    model = llama.LlamaForSequenceClassification(TINY, generator=Generator(0))
    of_ours = np.asarray(model.model.embed_tokens.embedding[...])
    for table in (of_theirs, of_ours):
        assert np.flatnonzero(~table.any(axis=1)).tolist() == [TINY.pad_token_id]


@pytest.mark.large
def test_left_and_right_padding_give_the_same_logits(x64: None, reference: Any) -> None:
    params = params_of(reference)
    right, left = batch("right"), batch("left")
    texts = [right["input_ids"][row, : LENGTHS[row]] for row in range(4)]
    for row, text in enumerate(texts):
        left["input_ids"][row, -len(text) :] = text
    assert distance(logits_of(params, left), logits_of(params, right)) < TOLERANCE


@pytest.mark.large
def test_without_a_mask_attention_is_only_causal(x64: None, reference: Any) -> None:
    arrays = batch("right")
    model = functional().module(params_of(reference), {})
    expected = reference(torch.from_numpy(arrays["input_ids"])).logits.detach().numpy()
    assert distance(np.asarray(model(jnp.asarray(arrays["input_ids"]))), expected) < TOLERANCE


def test_unpatched_transformers_computes_partly_in_float32(x64: None, their_model: Any, reference: Any) -> None:
    arrays = batch("right")
    expected = theirs(reference, arrays)["logits"]
    unpatched = their_classifier(like=their_model).double()
    assert 1e-9 < distance(theirs(unpatched, arrays)["logits"], expected) < 1e-5  # measured: 5e-7


@pytest.mark.large
def test_smollm2_135m_takes_the_same_steps_at_full_size(x64: None) -> None:
    """Random weights, two sequences of up to 16 tokens, two steps of SGD in float64; takes 11 GB."""
    config, lr = dataclasses.replace(LlamaConfig(), pad_token_id=2), 0.1
    model = their_classifier(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008 + 2 * 576
    in_float64(model)
    params, optimizer = params_of(model, config), torch.optim.SGD(model.parameters(), lr)
    ids = np.random.default_rng(0).integers(3, config.vocab_size, (2, 16))
    ids[1, 11:] = config.pad_token_id
    arrays = {"input_ids": ids, "attention_mask": (ids != config.pad_token_id).astype(np.int64)}
    arrays["labels"] = np.array([0, 1])
    for _ in range(2):
        expected, actual = theirs(model, arrays), ours(params, arrays, config)
        assert max(distances(actual, expected).values()) < TOLERANCE_135M
        optimizer.step()
        updated = {name: value.astype(np.float64) - lr * actual[name] for name, value in to_torch(params).items()}
        params = from_torch(updated, params, {})[0]
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    assert max(distances(to_torch(params), weights).values()) < TOLERANCE_135M


# ---- planted faults


def interleaved(x: jax.Array, rotation: llama.Rotation) -> jax.Array:
    """Rotate in the layout of the original Llama, with neighbouring features as pairs."""
    cos, sin = (part[..., : x.shape[-1] // 2] for part in rotation)
    first, second = x[..., ::2], x[..., 1::2]
    return jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)


def next_to_last_tokens(ids: jax.Array, pad: int | None) -> jax.Array:
    return jnp.maximum(last_tokens(ids, pad) - 1, 0)


last_tokens = llama.last_tokens
PATCHES: dict[str, tuple[str, Callable[..., Any]]] = {
    "no rotary positions": ("rotated", lambda x, rotation: x),
    "interleaved rotary positions": ("rotated", interleaved),
    "the token before the last": ("last_tokens", next_to_last_tokens),
    "the last position, padding or not": ("last_tokens", lambda ids, pad: jnp.full(len(ids), ids.shape[1] - 1)),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fault", PATCHES)
def test_a_fault_in_the_code_is_caught(x64: None, reference: Any, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    expected = theirs(reference, batch("right"))["logits"]
    params = params_of(reference)
    monkeypatch.setattr(llama, *PATCHES[fault])
    assert distance(logits_of(params, batch("right")), expected) > FAULT


def test_faults_in_weights_and_sizes_are_caught(x64: None, reference: Any) -> None:
    expected = theirs(reference, batch("right"))["logits"]
    params = params_of(reference)

    def heads(part: str, change: Callable[[jax.Array], jax.Array]) -> Params:
        name = f"model.layers.0.self_attn.{part}_proj.kernel"
        kernel = params[name].reshape(TINY.hidden_size, -1, TINY.head_dim)
        return {**params, name: change(kernel).reshape(params[name].shape)}

    def mean(kernel: jax.Array) -> jax.Array:
        return jnp.broadcast_to(kernel.mean(axis=1, keepdims=True), kernel.shape)

    def interleave(kernel: jax.Array) -> jax.Array:  # as if head n had the keys of head n % 2
        return kernel[:, np.arange(6).reshape(3, 2).T.ravel()]

    faults = {
        "mean of the keys' heads": (heads("k", mean), TINY),
        "mean of the values' heads": (heads("v", mean), TINY),
        "heads in other groups": (heads("q", interleave), TINY),
        "eps": (params, dataclasses.replace(TINY, rms_norm_eps=1e-6)),
        "theta": (params, dataclasses.replace(TINY, rope_theta=10_000.0)),
    }
    off = {
        name: distance(logits_of(faulty, batch("right"), config), expected) for name, (faulty, config) in faults.items()
    }
    assert off.pop("eps") > 1e-5  # measured: 5e-4
    assert min(off.values()) > FAULT, off


# ---- 16 bits


@pytest.mark.large
def test_bfloat16_rounds_no_more_than_in_transformers(their_model: Any, reference: Any) -> None:
    arrays = batch("right")
    exact = theirs(reference, arrays)["logits"]
    their_error = distance(theirs(their_classifier(like=their_model).bfloat16(), arrays)["logits"], exact)
    error = distance(logits_of(cast(params_of(their_model), jnp.bfloat16), arrays).astype(np.float64), exact)
    assert 1e-3 < their_error < 0.1 and error < 1.5 * their_error  # measured: 0.021 and 0.017


@pytest.mark.large
def test_amp_rounds_no_more_than_torch_autocast(their_model: Any, reference: Any) -> None:
    arrays = batch("right")
    exact = theirs(reference, arrays)["logits"]
    with torch.autocast("cpu", torch.bfloat16):
        their_error = distance(theirs(their_model, arrays)["logits"], exact)
    model = functional().module(params_of(their_model), {})
    autocast(model, "bf16")
    error = distance(np.asarray(model(arrays["input_ids"], arrays["attention_mask"]), np.float64), exact)
    assert 1e-3 < their_error < 0.1 and error < 2 * their_error  # measured: 0.021 and 0.019
