"""What can be chosen, and what follows from it for both sides."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch_ref.config import TorchConfig


@dataclass(frozen=True)
class Options:
    """Fine-tune a Llama classifier on sentence pairs, in JAX and by transformers, and compare the two."""

    model_folder: Path | None = None
    """A checkpoint, SmolLM2's say: config.json, model.safetensors, tokenizer.json. None: a small model, drawn."""
    data: Path | None = None
    """MRPC: msr_paraphrase_train.txt, or GLUE's train .parquet. None: pairs made by templates."""
    test_data: Path | None = None
    """Held-out pairs in the same format. None: every fifth of --data."""
    dtype: Literal["float32", "float64", "bfloat16"] = "bfloat16"
    """Of the parameters and of what is computed with them."""
    epochs: int = 12
    """Passes over the pairs."""
    lr: float = 3e-3
    """Adam's rate."""
    global_batch_size: int = 32
    """Pairs per optimizer step, of all replicas."""
    max_length: int = 128
    """Tokens of a pair; what is longer is cut off."""
    proof_steps: int = 10
    """Steps in float64 before it, in which both sides must agree to rounding. 0: none."""
    devices: int | None = None
    """Number of replicas. None: all local GPUs, or 2 CPU devices."""
    platform: Literal["cpu", "gpu"] | None = None
    """None: GPUs where there are any."""
    seed: int = 0
    """Of the order, and of weights that are drawn."""

    def training(self) -> TorchConfig:
        """The same as both trainers' configuration."""
        return TorchConfig(
            optimizer="adam",
            lr=self.lr,
            epochs=self.epochs,
            global_batch_size=self.global_batch_size,
            devices=self.devices,
            platform=self.platform,
            seed=self.seed,
        )
