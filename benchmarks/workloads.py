"""Workloads of the benchmark: model, sizes, data and batch of each; needs neither jax nor torch.

The data are made from a fixed seed, so that every process makes the same.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxddp.config import TrainConfig
from jaxddp.data import datasets

Arrays = dict[str, np.ndarray]

STEPS_PER_EPOCH = 8  # of the workloads that bring data
LLAMA = {
    "vocab_size": 512,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Workload:
    """One job, which every contender does; the optimizer is Adam and the dtype float32.

    Attributes:
        name: name in the table.
        description: the model in a few words.
        batch_size: examples per optimizer step over all replicas.
        model: name of the module in `benchmarks.models_jax` and `benchmarks.models_torch`; None: the trainer's.
        sizes: arguments of that module.
        config: flags of `jaxddp.train`; None: the trainer does not have the model.
        lr: learning rate.
    """

    name: str
    description: str
    batch_size: int
    model: str | None = None
    sizes: dict[str, Any] = field(default_factory=dict)
    config: TrainConfig | None = None
    lr: float = 1e-3

    @property
    def has_convolutions(self) -> bool:
        """Return whether XLA's CPU backend is slow at the model in a loop."""
        return "conv" in self.name or self.model == "residual"

    def arrays(self) -> Arrays:
        """Return the training set: the model's arguments by name, and integer labels "y"."""
        if self.config is not None:
            return datasets.load(self.config).train
        examples = self.batch_size * STEPS_PER_EPOCH
        make = {"decoder": _tokens, "llama": _padded_tokens}.get(str(self.model), _images)
        return make(np.random.default_rng(0), examples, self.sizes)

    def with_lr(self, lr: float) -> "Workload":
        """Return the workload with another learning rate."""
        config = None if self.config is None else dataclasses.replace(self.config, lr=lr)
        return dataclasses.replace(self, lr=lr, config=config)


def workloads(small: bool = False) -> dict[str, Workload]:
    """Return all workloads by name, as they are measured or, with `small`, as the tests run them."""
    return {workload.name: workload for workload in (*_of_the_trainer(small), *_modules(small))}


def _of_the_trainer(small: bool) -> list[Workload]:
    batch = 16 if small else 128
    examples, features, wide = (256, 32, (16, 16)) if small else (4096, 784, (512, 512))
    mlp = TrainConfig(hidden_sizes=(8,)) if small else TrainConfig()
    configs = {
        "mlp": ("the default job of jaxddp.train: 64-128-128-10 on the digits", mlp),
        "wide_mlp": (
            "784-512-512-10",
            TrainConfig(
                dataset="linear",
                num_features=features,
                num_classes=10,
                num_examples=examples,
                hidden_sizes=wide,
                global_batch_size=batch,
            ),
        ),
        "convnet": (
            "--model convnet: residual, BatchNorm, 8x8 digits",
            TrainConfig(model="convnet", hidden_sizes=(2,) if small else None, global_batch_size=batch),
        ),
        "char_mlp": (
            "--model char_mlp: the next letter from three",
            TrainConfig(dataset="names", model="char_mlp", global_batch_size=batch),
        ),
    }
    return [Workload(name, text, config.global_batch_size, config=config) for name, (text, config) in configs.items()]


def _modules(small: bool) -> list[Workload]:
    batch = 8 if small else 128
    two_convs = (
        {"size": 8, "inputs": 1, "channels": (2, 4)} if small else {"size": 28, "inputs": 1, "channels": (32, 64)}
    )
    residual = (
        {"size": 8, "inputs": 3, "channels": (2, 4)} if small else {"size": 32, "inputs": 3, "channels": (16, 32, 64)}
    )
    width, heads, layers, length, vocabulary = (16, 2, 1, 8, 16) if small else (256, 4, 4, 128, 256)
    decoder = {"vocabulary": vocabulary, "length": length, "width": width, "heads": heads, "layers": layers}
    llama = LLAMA | (
        {"hidden_size": 12, "intermediate_size": 16, "vocab_size": 32, "num_hidden_layers": 1} if small else {}
    )
    sequences = 8 if small else 16
    return [
        Workload("two_convs", "3x3 convolutions of 32 and 64, max pooling, 28x28", batch, "two_convs", two_convs),
        Workload("residual", "residual blocks of 16, 32, 64, BatchNorm, 32x32x3", batch, "residual", residual),
        Workload("decoder", "4 layers of 256, 128 tokens", sequences, "decoder", {**decoder, "dropout": 0.0}),
        Workload("decoder_dropout", "the same, dropout 0.1", sequences, "decoder", {**decoder, "dropout": 0.1}),
        Workload("llama", "fine-tuning of a small Llama, 2 layers of 48", 8 if small else 32, "llama", llama),
    ]


def _images(rng: np.random.Generator, examples: int, sizes: dict[str, Any]) -> Arrays:
    """Draw images (N, H, W, C) whose brightness depends on the label."""
    y = rng.integers(0, 10, examples).astype(np.int32)
    noise = rng.normal(size=(examples, sizes["size"], sizes["size"], sizes["inputs"]))
    return {"x": (noise + y[:, None, None, None] / 10).astype(np.float32), "y": y}


def _tokens(rng: np.random.Generator, examples: int, sizes: dict[str, Any]) -> Arrays:
    """Draw sequences that count upwards with random strides, and the next token at each place."""
    start, stride = rng.integers(0, sizes["vocabulary"], (examples, 1)), rng.integers(1, 4, (examples, 1))
    tokens = (start + stride * np.arange(sizes["length"] + 1)) % sizes["vocabulary"]
    return {"x": tokens[:, :-1].astype(np.int32), "y": tokens[:, 1:].astype(np.int32)}


def _padded_tokens(rng: np.random.Generator, examples: int, sizes: dict[str, Any]) -> Arrays:
    """Draw sequences of 24 to 40 tokens, padded on the right, of two classes."""
    lengths = rng.integers(24, 41, examples)
    mask = np.arange(40) < lengths[:, None]
    tokens = np.where(mask, rng.integers(1, sizes["vocab_size"], mask.shape), sizes["pad_token_id"])
    y = (tokens[:, 0] % 2).astype(np.int32)
    return {"input_ids": tokens.astype(np.int32), "attention_mask": mask.astype(np.int32), "y": y}
