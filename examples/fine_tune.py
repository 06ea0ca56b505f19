"""SmolLM2 with a classification head on MRPC: does one sentence say what the other says? Flax beside transformers.

    jaxddp train examples/fine_tune.py       # 6 s on two cores; accuracy 0.92 on the pairs held out
    python -m torch_ref.train examples/fine_tune.py    # 6 s; accuracy 1.0, from other initial weights
    jaxddp check examples/fine_tune.py      # equal
    jaxddp train examples/fine_tune.py --model-folder SmolLM2-135M --data msr_paraphrase_train.txt \\
        --devices 8 --amp bf16 --lr 1e-4 --epochs 3 --global-batch-size 64         # a node of eight GPUs: not measured

Without files, a small model of the same architecture learns pairs of sentences made from templates.
"""

import csv
import dataclasses
import random
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.nn import functional as F

from jaxddp import cross_entropy
from jaxddp.data.torch_rng import Generator
from jaxddp.errors import InputError
from jaxddp.models.llama import LlamaForSequenceClassification, from_pretrained
from jaxddp.models.llama_config import LlamaConfig
from jaxddp.parity.torch_side.widened import InFloat64

epochs, global_batch_size, optimizer, lr = 20, 32, "adam", 3e-3


@dataclass(frozen=True)
class Options:
    model_folder: str | None = None
    """Checkpoint, as of SmolLM2: config.json, model.safetensors, tokenizer.json. None: a small random model."""
    data: str | None = None
    """MRPC: msr_paraphrase_train.txt, or GLUE's .parquet; every fifth pair is for the test. None: 640 made pairs."""
    max_length: int = 128
    """Tokens per pair; longer pairs are truncated."""


PADDING = "<|endoftext|>"  # SmolLM2's, unless its config names another
SIZES = LlamaConfig(512, 48, 96, 2, num_attention_heads=6, num_key_value_heads=2, initializer_range=0.15)
SUBJECTS = ("the price of copper", "traffic in the harbour", "the theatre's income", "the lake's level")
VERBS = (("fell", "dropped", "went down"), ("rose", "climbed", "went up"))
AMOUNTS = ("by three percent", "slightly", "by a third", "sharply")
TIMES = ("in march", "last week", "on tuesday", "over the summer")
FORMS = ("{0} {1} {2} {3}.", "{3}, {0} {1} {2}.", "{3} {0} {1} {2}, it is said.", "it turned out that {0} {1} {2} {3}.")


def made(count: int) -> list[tuple[str, str, int]]:
    """Make distinct pairs about something that rises or falls; half of the pairs contradict themselves."""
    draw = random.Random(0)
    pairs: dict[tuple[str, ...], int] = {}
    while len(pairs) < count:
        said = draw.choice(SUBJECTS), draw.choice(AMOUNTS), draw.choice(TIMES)
        rises, same = draw.randint(0, 1), draw.randint(0, 1)
        ways = [draw.choice(VERBS[way]) for way in (rises, rises if same else 1 - rises)]
        both = (f.format(said[0], v, *said[1:]) for f, v in zip(draw.sample(FORMS, 2), ways, strict=True))
        pairs[tuple(map(str.capitalize, both))] = same
    return [(first, second, same) for (first, second), same in pairs.items()]


def read(path: Path) -> list[tuple[str, str, int]]:
    """Read the pairs of MRPC's text file, or of GLUE's .parquet file."""
    names = ("#1 String", "#2 String", "Quality")
    if path.suffix == ".parquet":
        from pyarrow import parquet

        rows, names = parquet.read_table(path).to_pylist(), ("sentence1", "sentence2", "label")
    else:  # quotation marks are plain text, some of them unpaired
        with path.open(encoding="utf-8-sig", newline="") as lines:
            rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    for number, row in enumerate(rows, start=1):
        if any(row.get(name) is None for name in names) or str(row[names[2]]) not in ("0", "1"):
            raise InputError(f"--data {path}: pair {number}: must have {', '.join(names)}, the last of them 0 or 1")
    return [(row[names[0]], row[names[1]], int(row[names[2]])) for row in rows]


@lru_cache(maxsize=1)
def material(options: Options) -> tuple[LlamaConfig, dict[str, np.ndarray]]:
    """Return the model's sizes, and the tokens of all pairs: the two sentences in one row, padded on the right."""
    pairs = made(640) if options.data is None else read(Path(options.data))
    if options.model_folder is not None:
        config = LlamaConfig.from_folder(options.model_folder)
        tokenizer = Tokenizer.from_file(f"{options.model_folder}/tokenizer.json")
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=[PADDING], initial_alphabet=alphabet)
        trainer.show_progress = False
        tokenizer.train_from_iterator((s for *both, _ in pairs for s in both), trainer)
        config = dataclasses.replace(SIZES, vocab_size=tokenizer.get_vocab_size())
    padding = tokenizer.token_to_id(PADDING) if config.pad_token_id is None else config.pad_token_id
    if padding is None or not 0 <= padding < tokenizer.get_vocab_size() <= config.vocab_size:
        tokens, where = tokenizer.get_vocab_size(), f"--model-folder {options.model_folder}"
        raise InputError(f"{where}: {tokens} tokens and padding {padding} do not fit a model of {config.vocab_size}")
    tokenizer.enable_truncation(min(options.max_length, config.max_position_embeddings))
    rows = [tokenizer.encode(first, second).ids for first, second, _ in pairs]
    length = -(-max(map(len, rows)) // 8) * 8
    arrays = {
        "input_ids": np.array([ids + [padding] * (length - len(ids)) for ids in rows], np.int32),
        "attention_mask": np.array([[1] * len(ids) + [0] * (length - len(ids)) for ids in rows], np.int32),
        "labels": np.array([label for *_, label in pairs], np.int32),
    }
    return dataclasses.replace(config, pad_token_id=padding), arrays


def train_data(options: Options):
    return {name: x[np.arange(len(x)) % 5 > 0] for name, x in material(options)[1].items()}


def test_data(options: Options):
    return {name: x[::5] for name, x in material(options)[1].items()}


def jax_model(options: Options, config):
    sizes, generator = material(options)[0], Generator(config.seed)
    if options.model_folder is not None:
        return from_pretrained(options.model_folder, sizes, generator=generator)
    return LlamaForSequenceClassification(sizes, generator=generator)


def jax_loss(model, batch):
    logits = model(batch["input_ids"], batch["attention_mask"])
    return cross_entropy(lambda x: x, {"x": logits, "y": batch["labels"]})


def torch_model(options: Options):
    config = material(options)[0]
    sizes = transformers.LlamaConfig(**config.of_transformers())
    if options.model_folder is not None:
        model = transformers.LlamaForSequenceClassification.from_pretrained(options.model_folder, config=sizes)
    else:
        model = transformers.LlamaForSequenceClassification(sizes)
    powers = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    model.model.rotary_emb.inv_freq = config.rope_theta**-powers  # in a float64 run transformers rounds it to float32
    return model


def torch_loss(model, batch):
    with InFloat64() if model.dtype == torch.float64 else nullcontext():  # not in transformers' float32
        logits = model(batch["input_ids"], batch["attention_mask"]).logits
    right = logits.argmax(-1) == batch["labels"]
    return F.cross_entropy(logits, batch["labels"], reduction="none"), {"accuracy": right.to(logits.dtype)}
