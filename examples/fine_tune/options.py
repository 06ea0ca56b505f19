"""Options of the fine-tune, and the training configuration of both frameworks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch_ref.config import TorchConfig


@dataclass(frozen=True)
class Options:
    """Fine-tune a Llama classifier on sentence pairs in JAX and by transformers, and compare the two."""

    model_folder: Path | None = None
    """Checkpoint, for example SmolLM2's: config.json, model.safetensors, tokenizer.json. None: a small random model."""
    data: Path | None = None
    """MRPC: msr_paraphrase_train.txt, or GLUE's train .parquet. None: pairs made by templates."""
    test_data: Path | None = None
    """Held-out pairs in the same format. None: every fifth of --data."""
    dtype: Literal["float32", "float64", "bfloat16"] = "bfloat16"
    """Dtype of parameters and computation."""
    epochs: int = 12
    """Passes over the pairs."""
    lr: float = 3e-3
    """Adam's learning rate."""
    global_batch_size: int = 32
    """Pairs per optimizer step, over all replicas."""
    max_length: int = 128
    """Tokens per pair; longer pairs are truncated."""
    proof_steps: int = 10
    """Preceding steps in float64, in which both frameworks must agree up to rounding. 0: none."""
    devices: int | None = None
    """Number of replicas. None: all local GPUs, or 2 CPU devices."""
    platform: Literal["cpu", "gpu"] | None = None
    """None: GPUs if there are any."""
    seed: int = 0
    """Seed of the sample order and of random weights."""

    def training(self) -> TorchConfig:
        """Convert the options to the training configuration of both frameworks."""
        return TorchConfig(
            optimizer="adam",
            lr=self.lr,
            epochs=self.epochs,
            global_batch_size=self.global_batch_size,
            devices=self.devices,
            platform=self.platform,
            seed=self.seed,
        )
