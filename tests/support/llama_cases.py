"""A small Llama classifier in jaxddp and in transformers, on the same numbers."""

import functools
from typing import Any

import jax
import numpy as np
import torch
import transformers
from jax import numpy as jnp

from examples.arrays import distance
from jaxddp.models.llama import LlamaForSequenceClassification
from jaxddp.models.llama_config import LlamaConfig
from jaxddp.nn.functional import Functional, cast
from jaxddp.nn.losses import cross_entropy
from jaxddp.nn.torch_weights import from_torch, to_torch
from jaxddp.state import Params

TINY = LlamaConfig(
    vocab_size=61,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    initializer_range=0.2,  # so that attention is far from even and faults show
    num_labels=3,
    pad_token_id=0,
)
LENGTHS = np.array([9, 4, 7, 1])
Arrays = dict[str, np.ndarray]


def batch(padding: str, length: int = 9) -> Arrays:
    """Return sequences of unequal length, padded on one side; one has the padding token in its text."""
    rng = np.random.default_rng(3)
    mask = (np.arange(length)[None] < LENGTHS[:, None]).astype(np.int64)
    mask = mask[:, ::-1].copy() if padding == "left" else mask
    ids = rng.integers(1, 61, (4, length)) * mask
    ids[0, 3] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": np.array([0, 2, 1, 2])}


def their_config(config: LlamaConfig = TINY) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**config.of_transformers(), tie_word_embeddings=True)


def their_classifier(config: LlamaConfig = TINY, like: torch.nn.Module | None = None) -> Any:
    """Return transformers' classifier, newly drawn or with the weights of `like`."""
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(their_config(config))
    if like is not None:
        model.load_state_dict(like.state_dict())
    return model


def theirs(model: torch.nn.Module, arrays: Arrays) -> Arrays:
    """Return logits, loss and gradients of transformers' model, under torch's names."""
    model.zero_grad()
    output = model(**{name: torch.from_numpy(array) for name, array in arrays.items()})
    output.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    outputs = {"logits": output.logits.detach(), "loss": output.loss.detach(), **gradients}
    return {name: value.double().numpy() for name, value in outputs.items()}


@functools.cache
def functional(config: LlamaConfig = TINY) -> Functional:
    return Functional(LlamaForSequenceClassification(config, generator=None))


def params_of(model: torch.nn.Module, config: LlamaConfig = TINY) -> Params:
    """Convert a torch model's weights to jaxddp's parameters, in jax's default dtype."""
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
    """Return logits, loss and gradients of jaxddp's model, under torch's names."""
    (value, logits), gradients = loss_and_gradients(params, arrays, config)
    outputs = {"logits": np.asarray(logits), "loss": np.asarray(value), **to_torch(gradients)}
    return {name: value.astype(np.float64) for name, value in outputs.items()}


def logits_of(params: Params, arrays: Arrays, config: LlamaConfig = TINY) -> np.ndarray:
    """Return the logits of jaxddp's model without compiling it, because each planted fault changes the program."""
    model = functional(config).module(params, {})
    return np.asarray(model(jnp.asarray(arrays["input_ids"]), jnp.asarray(arrays["attention_mask"])))


def distances(outputs: Arrays, expected: Arrays) -> dict[str, float]:
    """Return the distance of each array from the expected one."""
    assert outputs.keys() == expected.keys()
    return {name: distance(outputs[name], expected[name]) for name in expected}
