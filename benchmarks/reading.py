"""Rate at which examples are read: images decoded, and windows of tokens, by jaxddp's loader and torch's DataLoader.

python -m benchmarks.reading jaxddp images 2 5 FOLDER     2 workers, for 5 seconds

Each contender runs in a process of its own, since torch's workers are forks, which a process with jax must not make.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

from jaxddp.data import image_folder, token_file

SIDES, KINDS, WORKERS = ("jaxddp", "torch"), ("images", "tokens"), (0, 2)
BATCH = {"images": 32, "tokens": 64}
WINDOW = 1024  # tokens
IMAGES, SIDE = 256, 224  # number of the images, and pixels of their sides
TOKENS = 2**24


def measure(rounds: int, seconds: float, small: bool = False) -> dict[str, dict[str, dict[str, float]]]:
    """Return examples per second by kind, contender and number of workers: the median of the rounds, in turns."""
    kinds, counts = (KINDS[1:], WORKERS[:1]) if small else (KINDS, WORKERS)
    rates: dict[tuple[str, str, int], list[float]] = {
        (kind, side, workers): [] for kind in kinds for workers in counts for side in SIDES
    }
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        make_data(Path(folder))
        for _ in range(rounds):
            for (kind, side, workers), seen in rates.items():
                command = [sys.executable, "-m", "benchmarks.reading", side, kind, str(workers), str(seconds), folder]
                seen.append(
                    json.loads(subprocess.run(command, capture_output=True, check=True).stdout.splitlines()[-1])
                )
    return {
        kind: {
            side: {f"{workers} workers": round(median(rates[kind, side, workers])) for workers in counts}
            for side in SIDES
        }
        for kind in kinds
    }


def make_data(folder: Path) -> None:
    """Write JPEG images of two classes and a file of tokens."""
    rng = np.random.default_rng(0)
    for number in range(IMAGES):
        path = folder / f"images/{number % 2}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (14, 14, 3), dtype=np.uint8))
        coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(path, quality=90)
    rng.integers(0, 50257, TOKENS, dtype=np.uint16).tofile(folder / "tokens.bin")


def data(kind: str, folder: Path) -> Any:
    """Return the examples, as a user's file has them for both frameworks."""
    return image_folder(folder / "images") if kind == "images" else token_file(folder / "tokens.bin", WINDOW)


def jaxddp_batches(kind: str, workers: int, folder: Path) -> Iterator[Any]:
    """Yield batches of jaxddp's loader, which stay in the process, as torch's do."""
    from jaxddp.distributed.replicas import VirtualReplicas
    from jaxddp.loader import Loader

    loader = Loader(
        data(kind, folder),
        VirtualReplicas(1),
        global_batch_size=BATCH[kind],
        steps_per_dispatch=1,
        num_workers=workers,
    )
    for epoch in range(2**20):
        yield from loader.host_batches(epoch)


def torch_batches(kind: str, workers: int, folder: Path) -> Iterator[Any]:
    """Yield batches of torch's DataLoader."""
    from torch.utils.data import DataLoader

    loader = DataLoader(
        data(kind, folder), BATCH[kind], shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    while True:
        yield from loader


def rate(batches: Iterator[Any], examples: int, seconds: float) -> float:
    """Return examples per second, after a few batches that start the workers."""
    for _ in range(4):
        next(batches)
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        next(batches)
        count += examples
    return count / (time.perf_counter() - started)


def main() -> None:
    """Measure one contender, and print its rate."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reading")
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("workers", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    batches = {"jaxddp": jaxddp_batches, "torch": torch_batches}[options.side]
    print(rate(batches(options.kind, options.workers, options.folder), BATCH[options.kind], options.seconds))


if __name__ == "__main__":
    main()
