"""The Llama classifier against transformers' own: logits, loss and gradients, checkpoints, 16 bits."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from jax import numpy as jnp
from safetensors.torch import load_file, save_file

from examples.fine_tune.double import in_float64
from examples.fine_tune.material import sizes
from jaxddp.amp import autocast
from jaxddp.errors import InputError
from jaxddp.functional import Functional, cast
from jaxddp.losses import cross_entropy
from jaxddp.models import llama
from jaxddp.models.llama import LlamaForSequenceClassification, from_pretrained
from jaxddp.models.llama_config import LlamaConfig
from jaxddp.state import Params
from jaxddp.torch_random import Generator
from jaxddp.weights import from_torch, to_torch

# In float64, as a part of an array's largest value, and what was measured.
TOLERANCE = 1e-13  # 4.5e-15
TOLERANCE_135M = 1e-12  # at the full size: 1e-13 (a gradient; logits 2e-14, weights after two steps 9e-15)
FAULT = 0.05  # of the logits, with a planted fault, at least: 0.2

TINY = LlamaConfig(
    vocab_size=61,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    initializer_range=0.2,  # so that attention is not nearly even, and faults show
    num_labels=3,
    pad_token_id=0,
)
LENGTHS = np.array([9, 4, 7, 1])
Arrays = dict[str, np.ndarray]


def batch(padding: str, length: int = 9) -> Arrays:
    """Sequences of unequal length, padded on one side; one of them has the token of padding in its text."""
    rng = np.random.default_rng(3)
    mask = (np.arange(length)[None] < LENGTHS[:, None]).astype(np.int64)
    mask = mask[:, ::-1].copy() if padding == "left" else mask
    ids = rng.integers(1, 61, (4, length)) * mask
    ids[0, 3] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": np.array([0, 2, 1, 2])}


def their_config(config: LlamaConfig = TINY) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**sizes(config), tie_word_embeddings=True)


def their_classifier(config: LlamaConfig = TINY, like: torch.nn.Module | None = None) -> Any:
    """transformers' own, drawn anew or with the weights of another."""
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(their_config(config))
    if like is not None:
        model.load_state_dict(like.state_dict())
    return model


@pytest.fixture(scope="module")
def their_model() -> Any:
    return their_classifier()


@pytest.fixture
def reference(their_model: Any) -> Any:
    """A copy of it, in float64 all through."""
    return in_float64(their_classifier(like=their_model))


@pytest.fixture
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def theirs(model: torch.nn.Module, arrays: Arrays) -> Arrays:
    """Logits, loss and gradients, by torch's names."""
    model.zero_grad()
    output = model(**{name: torch.from_numpy(array) for name, array in arrays.items()})
    output.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {"logits": output.logits.detach(), "loss": output.loss.detach(), **gradients}
    return {name: value.double().numpy() for name, value in found.items()}


@functools.cache
def functional(config: LlamaConfig = TINY) -> Functional:
    return Functional(LlamaForSequenceClassification(config, generator=None))


def params_of(model: torch.nn.Module, config: LlamaConfig = TINY) -> Params:
    """A model's weights as ours, in jax's default dtype."""
    like = functional(config)
    tensors = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
    params = cast(like.params, jnp.zeros(()).dtype)
    return from_torch(tensors, params, like.buffers)[0]


@functools.partial(jax.jit, static_argnums=2)
@functools.partial(jax.value_and_grad, has_aux=True)
def loss_and_gradients(params: Params, arrays: Arrays, config: LlamaConfig) -> tuple[jax.Array, jax.Array]:
    model = functional(config).module(params, {})
    logits = model(arrays["input_ids"], arrays["attention_mask"])
    return cross_entropy(lambda x: x, {"x": logits, "y": arrays["labels"]}).values.mean(), logits


def ours(params: Params, arrays: Arrays, config: LlamaConfig = TINY) -> Arrays:
    """The same of ours, by torch's names too."""
    (value, logits), gradients = loss_and_gradients(params, arrays, config)
    found = {"logits": np.asarray(logits), "loss": np.asarray(value), **to_torch(gradients)}
    return {name: value.astype(np.float64) for name, value in found.items()}


def logits_of(params: Params, arrays: Arrays, config: LlamaConfig = TINY) -> np.ndarray:
    """Ours, without compiling it: faults change the program each time."""
    model = functional(config).module(params, {})
    return np.asarray(model(jnp.asarray(arrays["input_ids"]), jnp.asarray(arrays["attention_mask"])))


def distance(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.max(np.abs(a - b)) / np.max(np.abs(b)))


def distances(found: Arrays, expected: Arrays) -> dict[str, float]:
    assert found.keys() == expected.keys()
    return {name: distance(found[name], expected[name]) for name in expected}


@pytest.mark.parametrize("padding", ["right", "left"])
def test_logits_loss_and_gradients_are_those_of_transformers(x64: None, reference: Any, padding: str) -> None:
    expected = theirs(reference, batch(padding))
    found = ours(params_of(reference), batch(padding))
    assert max(distances(found, expected).values()) < TOLERANCE
    assert not found["model.embed_tokens.weight"][TINY.pad_token_id].any()  # though it is in a text


def test_both_paddings_give_the_same_logits(x64: None, reference: Any) -> None:
    params = params_of(reference)
    right, left = batch("right"), batch("left")
    texts = [right["input_ids"][row, : LENGTHS[row]] for row in range(4)]
    for row, text in enumerate(texts):
        left["input_ids"][row, -len(text) :] = text
    assert distance(logits_of(params, left), logits_of(params, right)) < TOLERANCE


def test_without_a_mask_only_later_tokens_are_hidden(x64: None, reference: Any) -> None:
    arrays = batch("right")
    model = functional().module(params_of(reference), {})
    expected = reference(torch.from_numpy(arrays["input_ids"])).logits.detach().numpy()
    assert distance(np.asarray(model(jnp.asarray(arrays["input_ids"]))), expected) < TOLERANCE


def test_transformers_alone_rounds_float64_to_float32(x64: None, their_model: Any, reference: Any) -> None:
    arrays = batch("right")
    expected = theirs(reference, arrays)["logits"]
    as_it_comes = their_classifier(like=their_model).double()
    assert 1e-9 < distance(theirs(as_it_comes, arrays)["logits"], expected) < 1e-5  # measured: 5e-7


@pytest.mark.large
def test_smollm2_135m_of_the_full_size_takes_the_same_steps(x64: None) -> None:
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
        expected, found = theirs(model, arrays), ours(params, arrays, config)
        assert max(distances(found, expected).values()) < TOLERANCE_135M
        optimizer.step()
        moved = {name: value.astype(np.float64) - lr * found[name] for name, value in to_torch(params).items()}
        params = from_torch(moved, params, {})[0]
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    assert max(distances(to_torch(params), weights).values()) < TOLERANCE_135M


# ---- planted faults


def interleaved(x: jax.Array, rotation: llama.Rotation) -> jax.Array:
    """Rotary positions in the layout of the original Llama: neighbours are pairs."""
    cos, sin = (part[..., : x.shape[-1] // 2] for part in rotation)
    first, second = x[..., ::2], x[..., 1::2]
    return jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)


def one_before(ids: jax.Array, pad: int | None) -> jax.Array:
    return jnp.maximum(last_tokens(ids, pad) - 1, 0)


last_tokens = llama.last_tokens
PATCHES: dict[str, tuple[str, Callable[..., Any]]] = {
    "no rotary positions": ("rotated", lambda x, rotation: x),
    "interleaved rotary positions": ("rotated", interleaved),
    "the token before the last": ("last_tokens", one_before),
    "the last place, padding or not": ("last_tokens", lambda ids, pad: jnp.full(len(ids), ids.shape[1] - 1)),
}


@pytest.mark.parametrize("fault", PATCHES)
def test_a_fault_in_the_code_is_seen(x64: None, reference: Any, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    expected = theirs(reference, batch("right"))["logits"]
    params = params_of(reference)
    monkeypatch.setattr(llama, *PATCHES[fault])
    assert distance(logits_of(params, batch("right")), expected) > FAULT


def test_faults_in_the_numbers_are_seen(x64: None, reference: Any) -> None:
    expected = theirs(reference, batch("right"))["logits"]
    params = params_of(reference)

    def heads(part: str, change: Callable[[jax.Array], jax.Array]) -> Params:
        name = f"model.layers.0.self_attn.{part}_proj.kernel"
        kernel = params[name].reshape(TINY.hidden_size, -1, TINY.head_dim)
        return {**params, name: change(kernel).reshape(params[name].shape)}

    def mean(kernel: jax.Array) -> jax.Array:
        return jnp.broadcast_to(kernel.mean(axis=1, keepdims=True), kernel.shape)

    def interleave(kernel: jax.Array) -> jax.Array:  # head n would have the keys of head n % 2
        return kernel[:, np.arange(6).reshape(3, 2).T.ravel()]

    faults = {
        "mean of the keys' heads": (heads("k", mean), TINY),
        "mean of the values' heads": (heads("v", mean), TINY),
        "heads grouped otherwise": (heads("q", interleave), TINY),
        "eps": (params, dataclasses.replace(TINY, rms_norm_eps=1e-6)),
        "theta": (params, dataclasses.replace(TINY, rope_theta=10_000.0)),
    }
    found = {
        name: distance(logits_of(*fault[:1], batch("right"), fault[1]), expected) for name, fault in faults.items()
    }
    assert found.pop("eps") > 1e-5  # measured: 5e-4
    assert min(found.values()) > FAULT, found


# ---- 16 bits


def test_bfloat16_rounds_as_much_as_in_transformers(their_model: Any, reference: Any) -> None:
    arrays = batch("right")
    exact = theirs(reference, arrays)["logits"]
    expected = distance(theirs(their_classifier(like=their_model).bfloat16(), arrays)["logits"], exact)
    found = distance(logits_of(cast(params_of(their_model), jnp.bfloat16), arrays).astype(np.float64), exact)
    assert 1e-3 < expected < 0.1 and found < 1.5 * expected  # measured: 0.021 and 0.017


def test_amp_rounds_as_much_as_torch_autocast(their_model: Any, reference: Any) -> None:
    arrays = batch("right")
    exact = theirs(reference, arrays)["logits"]
    with torch.autocast("cpu", torch.bfloat16):
        expected = distance(theirs(their_model, arrays)["logits"], exact)
    model = functional().module(params_of(their_model), {})
    autocast(model, "bf16")
    found = distance(np.asarray(model(arrays["input_ids"], arrays["attention_mask"]), np.float64), exact)
    assert 1e-3 < expected < 0.1 and found < 2 * expected  # measured: 0.021 and 0.019


# ---- checkpoints


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model's folder as SmolLM2's is: tied embeddings, bfloat16."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(their_config()).bfloat16().save_pretrained(folder)
    return folder


def test_a_language_models_folder_becomes_transformers_classifier(checkpoint: Path) -> None:
    config = LlamaConfig.from_folder(checkpoint)
    assert config == TINY
    found = to_torch(Functional(from_pretrained(checkpoint, config, generator=Generator(7))).params)
    saved = load_file(checkpoint / "model.safetensors")
    assert found.keys() == saved.keys() | {"score.weight"} and "lm_head.weight" not in saved
    assert all(np.array_equal(found[name], saved[name].float().numpy()) for name in saved)
    torch.manual_seed(7)
    model = transformers.LlamaForSequenceClassification.from_pretrained(checkpoint, num_labels=3, dtype=torch.float32)
    assert distance(found["score.weight"], model.score.weight.detach().numpy()) < 3e-7  # measured: 1e-7


def test_an_untied_checkpoints_head_is_left_out(checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.zeros(61, 48)}, tmp_path / "model.safetensors")
    from_pretrained(tmp_path, TINY, generator=Generator(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "missing model.norm.weight"),
        ({"model.norm.bias": torch.zeros(48)}, "left over model.norm.bias"),
        ({"model.norm.weight": torch.zeros(47)}, r"model.norm.weight has shape \(47,\) and not \(48,\)"),
    ],
)
def test_weights_that_do_not_fit_are_named(checkpoint: Path, tmp_path: Path, change: Any, message: str) -> None:
    tensors = load_file(checkpoint / "model.safetensors") | change
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(given, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=message):
        from_pretrained(tmp_path, TINY, generator=Generator(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "does not say hidden_size"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type llama3: not implemented"),
        ({"model_type": "mistral", "hidden_act": "gelu"}, "model_type mistral, hidden_act gelu: not implemented"),
        ({"head_dim": 16}, "head_dim 16: not implemented"),
        ({"num_attention_heads": 5}, "num_attention_heads 5: must divide hidden_size 48"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4: must divide num_attention_heads 6"),
    ],
)
def test_a_config_that_is_not_implemented_is_refused(
    checkpoint: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    said = json.loads((checkpoint / "config.json").read_text()) | change
    said = {name: value for name, value in said.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(InputError, match=message):
        LlamaConfig.from_folder(tmp_path)


def test_an_older_config_says_theta_elsewhere(checkpoint: Path, tmp_path: Path) -> None:
    said = json.loads((checkpoint / "config.json").read_text())
    del said["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps({**said, "rope_theta": 100_000, "rope_scaling": None}))
    assert LlamaConfig.from_folder(tmp_path) == TINY


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a readable config"):
        LlamaConfig.from_folder(tmp_path)
    with pytest.raises(InputError, match=r"--model-folder .*model.safetensors: not a readable"):
        from_pretrained(tmp_path, TINY, generator=Generator(0))


def test_several_sequences_need_a_token_of_padding() -> None:
    with pytest.raises(InputError, match="pad_token_id"):
        llama.last_tokens(jnp.ones((2, 3), int), None)
    assert llama.last_tokens(jnp.ones((1, 3), int), None).tolist() == [2]
