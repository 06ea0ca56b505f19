"""The check from end to end: what is right is equal, what is wrong is named, what fails costs its own part."""

import gc
import math
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_port import Change, at_start_of, own_optimizers, step, write

from jaxddp.parity.checking import check
from jaxddp.parity.findings import ORDER, Problem, Report
from jaxddp.parity.workers import Workers

STEPS = 3
HANGING = 5.0  # seconds without a word

WITH_FACTS = [  # batch normalisation, accumulation, clipping, a decay, options that optax shows
    ("import numpy as np\n", "import numpy as np\nfrom jaxddp.config import IGNORE_INDEX\n"),
    ("self.fc1 = torch.nn.Linear(3, 5)", "self.fc1 = torch.nn.Linear(3, 5)\n        self.bn = torch.nn.BatchNorm1d(5)"),
    ("torch.tanh(self.fc1(x))", "torch.tanh(self.bn(self.fc1(x)))"),
    (
        "self.fc1 = nnx.Linear(3, 5, rngs=rngs)",
        "from jaxddp.layers import BatchNorm\n"
        "            self.fc1 = nnx.Linear(3, 5, rngs=rngs)\n            self.bn = BatchNorm(5)",
    ),
    ("nnx.tanh(self.fc1(x))", "nnx.tanh(self.bn(self.fc1(x)))"),
    own_optimizers("AdamW(parameters, lr=0.01)", "optax.inject_hyperparams(optax.adamw)(0.01, weight_decay=0.01)"),
]
LINEN = [
    ("from flax import nnx", "from flax import linen"),
    ("class FlaxNet(nnx.Module):\n        def __init__(self, rngs):\n", "class FlaxNet(linen.Module):\n"),
    ("            self.fc1 = nnx.Linear(3, 5, rngs=rngs)\n            self.fc2 = nnx.Linear(5, 4, rngs=rngs)\n", ""),
    ("        def __call__", "        @linen.compact\n        def __call__"),
    ("self.fc2(nnx.tanh(self.fc1(x)))\n    r", 'linen.Dense(4, name="fc2")(linen.tanh(linen.Dense(5, name="fc1")(x)))\n    r'),
    ("FlaxNet(nnx.Rngs(0))", "FlaxNet()"),
]
WEIGHTED = [
    ('batch["y"])\n\ndef flax', 'batch["y"], reduction="none"), batch["w"]\n\ndef flax'),
    ('batch["y"]).mean()', 'batch["y"]), batch["w"]'),
    ('integers(0, 4, 12)}', 'integers(0, 4, 12), "w": rng.integers(0, 3, 12).astype(float)}'),
]
UNUSED = [
    ("torch.nn.Linear(5, 4)", "torch.nn.Linear(5, 4)\n        self.other = torch.nn.Linear(2, 2)"),
    ("nnx.Linear(5, 4, rngs=rngs)", "nnx.Linear(5, 4, rngs=rngs)\n            self.other = nnx.Linear(2, 2, rngs=rngs)"),
]
IMAGES = [
    ("torch.nn.Linear(3, 5)", "torch.nn.Conv2d(2, 5, 3)"),
    ("torch.tanh(self.fc1(x))", "torch.tanh(self.fc1(x)).mean((2, 3))"),
    ("nnx.Linear(3, 5, rngs=rngs)", 'nnx.Conv(2, 5, (3, 3), padding="VALID", rngs=rngs)'),
    ("nnx.tanh(self.fc1(x))", "nnx.tanh(self.fc1(x)).mean((1, 2))"),
    ("def batch(", "def torch_batch("),
    ("(12, 3)", "(12, 2, 4, 5)"),
]
