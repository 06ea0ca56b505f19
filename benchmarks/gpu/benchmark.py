"""Part `benchmark`: `python -m benchmarks` on the GPUs, a workload at a time, so that none is lost with another."""

import json
from functools import partial
from pathlib import Path

from benchmarks.gpu import part
from benchmarks.gpu.children import SHARED_GPU, run
from benchmarks.gpu.records import Record, Row
from benchmarks.workloads import workloads

WITH_MEASURES = "mlp"  # the workload with which the default job and what surrounds a step are measured
SMOKE_WORKLOADS = ("wide_mlp",)
GROWTH = "growth"
# Those that tell the most come first.
ORDER = ("decoder", "residual", "wide_mlp", "mlp", "convnet", "llama", "two_convs", "decoder_dropout", "char_mlp")


def measure(record: Record) -> None:
    """Race every workload, and measure growth."""
    flags = ["--platform", part.platform(record.smoke), *(["--smoke"] if record.smoke else [])]
    for name in SMOKE_WORKLOADS if record.smoke else ordered():
        parts = ["race", "measures"] if name == WITH_MEASURES else ["race"]
        record.add(name, partial(_benchmark, record.folder, name, [*flags, "--workloads", name, "--parts", *parts]))
    if not record.smoke:
        record.add(GROWTH, partial(_benchmark, record.folder, GROWTH, [*flags, "--parts", "growth"]))


def ordered() -> list[str]:
    """Return the names of all workloads.

    >>> sorted(ordered()) == sorted(workloads())
    True
    """
    return [*ORDER, *(name for name in workloads() if name not in ORDER)]


def _benchmark(folder: Path, name: str, words: list[str]) -> Row:
    path = folder / f"benchmark-{name}.json"
    run(["-m", "benchmarks", *words, "--output", str(path.absolute())], SHARED_GPU)
    record: Row = json.loads(path.read_text())
    path.unlink()  # the part's record has all of it
    return record


if __name__ == "__main__":
    part.run("benchmark", measure)
