"""Llama classifiers from Hugging Face checkpoint folders, and errors that name what does not fit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from jax import numpy as jnp
from safetensors.torch import load_file, save_file

from examples.arrays import distance
from jaxddp.data.torch_rng import Generator
from jaxddp.errors import InputError
from jaxddp.models import llama
from jaxddp.models.llama import from_pretrained
from jaxddp.models.llama_config import LlamaConfig
from jaxddp.nn.functional import Functional
from jaxddp.nn.torch_weights import to_torch
from tests.support.llama_cases import TINY, their_config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint folder of a language model like SmolLM2: tied embeddings, bfloat16."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(their_config()).bfloat16().save_pretrained(folder)
    return folder


def test_a_language_model_checkpoint_loads_as_in_transformers(checkpoint: Path) -> None:
    config = LlamaConfig.from_folder(checkpoint)
    assert config == TINY
    loaded = to_torch(Functional(from_pretrained(checkpoint, config, generator=Generator(7))).params)
    saved = load_file(checkpoint / "model.safetensors")
    assert loaded.keys() == saved.keys() | {"score.weight"} and "lm_head.weight" not in saved
    assert all(np.array_equal(loaded[name], saved[name].float().numpy()) for name in saved)
    torch.manual_seed(7)
    model = transformers.LlamaForSequenceClassification.from_pretrained(checkpoint, num_labels=3, dtype=torch.float32)
    # torch's last bits depend on the processor; measured: 2.3e-7 with AVX2, 5.5e-7 without vector instructions
    assert distance(loaded["score.weight"], model.score.weight.detach().numpy()) < 4e-6


def test_an_untied_lm_head_is_dropped(checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.zeros(61, 48)}, tmp_path / "model.safetensors")
    untied, tied = (
        to_torch(Functional(from_pretrained(folder, TINY, generator=Generator(0))).params)
        for folder in (tmp_path, checkpoint)
    )
    assert "lm_head.weight" not in untied
    np.testing.assert_equal(untied, tied)


def changed(values: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Return values with a change, without those that are None."""
    return {name: value for name, value in (values | change).items() if value is not None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "missing model.norm.weight"),
        ({"model.norm.bias": torch.zeros(48)}, "left over model.norm.bias"),
        ({"model.norm.weight": torch.zeros(47)}, r"model.norm.weight has shape \(47,\) and not \(48,\)"),
    ],
)
def test_weights_that_do_not_fit_are_named(checkpoint: Path, tmp_path: Path, change: Any, message: str) -> None:
    save_file(changed(load_file(checkpoint / "model.safetensors"), change), tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=message):
        from_pretrained(tmp_path, TINY, generator=Generator(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "config.json: hidden_size missing"),
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
    fields = changed(json.loads((checkpoint / "config.json").read_text()), change)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(InputError, match=message):
        LlamaConfig.from_folder(tmp_path)


def test_a_config_of_transformers_4_has_theta_at_top_level(checkpoint: Path, tmp_path: Path) -> None:
    fields = json.loads((checkpoint / "config.json").read_text())
    del fields["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps({**fields, "rope_theta": 100_000, "rope_scaling": None}))
    assert LlamaConfig.from_folder(tmp_path) == TINY


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a readable config"):
        LlamaConfig.from_folder(tmp_path)
    with pytest.raises(InputError, match=r"--model-folder .*model.safetensors: not a readable"):
        from_pretrained(tmp_path, TINY, generator=Generator(0))


def test_several_sequences_need_a_pad_token_id() -> None:
    with pytest.raises(InputError, match="pad_token_id None: must be set to locate the last tokens of 2 sequences"):
        llama.last_tokens(jnp.ones((2, 3), int), None)
    assert llama.last_tokens(jnp.ones((1, 3), int), None).tolist() == [2]
