"""Compare the losses of the same run in JAX and in PyTorch, epoch by epoch.

    python examples/side_by_side.py
    python examples/side_by_side.py --models mlp convnet --optimizers adam --epochs 3 --devices 4

The script runs `jaxddp train` and `python -m torch_ref.train` with the same flags in float64 and prints
their losses side by side. The exit code is 1 if a digit of a loss differs.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

from jaxddp.config.choices import MODELS, OPTIMIZERS


@dataclass(frozen=True)
class Options:
    """Train in JAX and in PyTorch and compare the losses of each epoch."""

    models: tuple[str, ...] = MODELS
    optimizers: tuple[str, ...] = OPTIMIZERS
    epochs: int = 2
    devices: int = 2
    global_batch_size: int = 32


def losses(module: str, flags: list[str]) -> list[str]:
    """Train, and return each epoch's train and test loss to 6 digits, from the run's metrics.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", module, *flags, "--output", f"{folder}/run"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            sys.exit(f"{' '.join(command)}\n{run.stdout}{run.stderr}")
        records = map(json.loads, (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines())
        return [f"{r['train_loss']:.6f} {r['test_loss']:.6f}" for r in records if r["kind"] == "epoch"]


def main(options: Options) -> int:
    """Print a line per model, optimizer and epoch; return the number of lines that differ."""
    different = 0
    print(f"float64, {options.devices} devices           train    test loss: jaxddp | torch_ref")
    for model in options.models:
        for optimizer in options.optimizers:
            flags = ["--model", model, "--optimizer", optimizer, "--epochs", str(options.epochs)]
            flags += ["--dataset", "names" if model == "char_mlp" else "digits"]
            flags += ["--devices", str(options.devices), "--platform", "cpu", "--dtype", "float64"]
            flags += ["--global-batch-size", str(options.global_batch_size), "--checkpoint-every", "0"]
            pairs = zip(losses("jaxddp.train", flags), losses("torch_ref.train", flags), strict=True)
            for epoch, (ours, theirs) in enumerate(pairs, start=1):
                verdict = "equal" if ours == theirs else "DIFFERENT"
                different += ours != theirs
                print(f"{model:9} {optimizer:8} epoch {epoch}    {ours} | {theirs}    {verdict}", flush=True)
    print("all equal to 6 digits" if not different else f"{different} lines differ")
    return different


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)) > 0)
