"""Model and data of the fine-tune, written to a folder as safetensors for both frameworks to read."""

import dataclasses
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file
from tokenizers import Tokenizer

from examples.fine_tune import pairs, tokens
from examples.fine_tune.options import Options
from examples.fine_tune.pairs import Pair
from jaxddp.data.torch_rng import Generator
from jaxddp.errors import InputError
from jaxddp.models.llama import LlamaForSequenceClassification, from_pretrained
from jaxddp.models.llama_config import LlamaConfig
from jaxddp.nn.functional import Functional
from jaxddp.nn.torch_weights import save_weights

MADE = (512, 128)  # pairs made for training, and held out
SMALL = LlamaConfig(
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    initializer_range=0.15,  # SmolLM2's, scaled to this width
)


def put(options: Options, folder: Path) -> LlamaConfig:
    """Write model.safetensors, train.safetensors and test.safetensors; return the model's configuration.

    Raises:
        InputError: a file that the options name is missing or has another format.
    """
    train, test = _pairs(options)
    config, tokenizer = _config(options, train)
    assert config.pad_token_id is not None  # set by `_config`
    longest = min(options.max_length, config.max_position_embeddings)
    for name, arrays in tokens.encoded(tokenizer, {"train": train, "test": test}, config.pad_token_id, longest).items():
        save_file(arrays, folder / f"{name}.safetensors")
    model = Functional(_model(options, config))
    save_weights(folder / "model.safetensors", model.params, model.buffers)
    return config


def sizes(config: LlamaConfig) -> dict[str, Any]:
    """Convert a configuration to arguments of transformers' LlamaConfig."""
    arguments = dataclasses.asdict(config)
    arguments["rope_parameters"] = {"rope_type": "default", "rope_theta": arguments.pop("rope_theta")}
    return arguments


def _pairs(options: Options) -> tuple[list[Pair], list[Pair]]:
    if options.data is None:
        all_pairs = pairs.made(sum(MADE))
        return all_pairs[: MADE[0]], all_pairs[MADE[0] :]
    given = pairs.read(options.data)
    return (given, pairs.read(options.test_data)) if options.test_data else pairs.split(given)


def _config(options: Options, train: list[Pair]) -> tuple[LlamaConfig, Tokenizer]:
    if options.model_folder is None:
        tokenizer = tokens.trained(train)
        config = dataclasses.replace(SMALL, vocab_size=tokenizer.get_vocab_size())
    else:
        tokenizer = tokens.loaded(options.model_folder)
        config = LlamaConfig.from_folder(options.model_folder)
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise InputError(
            f"--model-folder {options.model_folder}: its tokenizer has {tokenizer.get_vocab_size()} tokens, its model "
            f"{config.vocab_size}"
        )
    padding = tokens.padding_id(tokenizer, config.pad_token_id)
    return dataclasses.replace(config, pad_token_id=padding), tokenizer


def _model(options: Options, config: LlamaConfig) -> LlamaForSequenceClassification:
    generator = Generator(options.seed)
    if options.model_folder is None:
        return LlamaForSequenceClassification(config, generator=generator)
    return from_pretrained(options.model_folder, config, generator=generator)
