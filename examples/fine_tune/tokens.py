"""Tokens of sentence pairs, by the tokenizers library."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.fine_tune.pairs import Pair
from jaxddp.errors import InputError

PADDING = "<|endoftext|>"  # SmolLM2's, unless the config names another
VOCABULARY = 512

Arrays = dict[str, np.ndarray]


def trained(pairs: Iterable[Pair]) -> Tokenizer:
    """Train a byte-level BPE tokenizer, SmolLM2's kind, on the sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((sentence for *both, _ in pairs for sentence in both), trainer)
    return tokenizer


def loaded(folder: Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint's folder.

    Raises:
        InputError: tokenizer.json is missing or cannot be read.
    """
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing more specific
        raise InputError(f"--model-folder {folder}: no readable tokenizer.json ({error})") from error


def padding_id(tokenizer: Tokenizer, configured: int | None) -> int:
    """Return the token that pads shorter pairs: the configured one, or `PADDING`.

    Raises:
        InputError: there is no such token.
    """
    number = tokenizer.token_to_id(PADDING) if configured is None else configured
    if number is None or not 0 <= number < tokenizer.get_vocab_size():
        token = PADDING if configured is None else configured
        raise InputError(f"--model-folder: its tokenizer has no token {token} to pad with")
    return number


def encoded(tokenizer: Tokenizer, parts: Mapping[str, list[Pair]], padding: int, longest: int) -> dict[str, Arrays]:
    """Encode each part as "input_ids" and "attention_mask" (N, T), and "labels" (N,), int64.

    The two sentences of a pair are concatenated. T is the length of the longest pair in any part, rounded up to a
    multiple of 8; pairs are truncated to `longest` tokens.
    """
    tokenizer.enable_truncation(longest)
    tokenizer.no_padding()
    rows = {part: [tokenizer.encode(first, second).ids for first, second, _ in pairs] for part, pairs in parts.items()}
    length = -(-max(len(ids) for some in rows.values() for ids in some) // 8) * 8
    return {
        part: {
            "input_ids": np.array([ids + [padding] * (length - len(ids)) for ids in some]),
            "attention_mask": np.array([[1] * len(ids) + [0] * (length - len(ids)) for ids in some]),
            "labels": np.array([label for *_, label in parts[part]]),
        }
        for part, some in rows.items()
    }
