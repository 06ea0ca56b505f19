"""Part `utilisation`: speed of the 124M decoder and the ResNet-50 in bf16, as a share of the measured matrix rate."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.gpu import part
from benchmarks.gpu.children import ask
from benchmarks.gpu.jobs import jobs
from benchmarks.gpu.records import Record, Row

FLOPS = "flops"
CONTENDERS = {
    "jaxddp": "jaxddp as it comes",
    "jaxddp_cudnn": "jaxddp, attention fused by cuDNN",
    "torch": "torch DDP",
    "torch_compile": "torch.compile of torch DDP",
}
MODULES = {
    "jaxddp": ("train_jax", []),
    "jaxddp_cudnn": ("train_jax", ["--attention", "cudnn"]),
    "torch": ("train_torch", []),
    "torch_compile": ("train_torch", ["--compiled"]),
}
# Each contender once in a smoke run; cuDNN's needs a GPU.
SMOKE = (("decoder", "jaxddp"), ("decoder", "torch"), ("convnet", "jaxddp"), ("convnet", "torch_compile"))
SMOKE_SECONDS = "0.02"
TIMEOUT = 240.0


def pairs(smoke: bool) -> list[tuple[str, str]]:
    """Return the jobs and contenders that are measured; only the decoder has attention."""
    every = [(job, contender) for job in jobs(smoke) for contender in CONTENDERS]
    return list(SMOKE) if smoke else [pair for pair in every if pair != ("convnet", "jaxddp_cudnn")]


def row_name(job: str, contender: str) -> str:
    """Return the name of a contender's row."""
    return f"{job}, {contender}"


def measure(record: Record) -> None:
    """Count the operations of both models, and measure every contender in a process of its own."""
    words = ["--smoke"] if record.smoke else []
    record.add(FLOPS, lambda: ask("benchmarks.gpu.flops", words, {"JAX_PLATFORMS": "cpu"}, TIMEOUT))
    short = [*words, "--seconds", SMOKE_SECONDS] if record.smoke else words
    for job, contender in pairs(record.smoke):
        module, flags = MODULES[contender]
        ask_child = partial(ask, f"benchmarks.gpu.{module}", [job, *flags, *short], timeout=TIMEOUT)
        record.add(row_name(job, contender), ask_child)


def bf16_rate(machine: Mapping[str, Any]) -> float | None:
    """Return the measured rate of bf16 matrix products of one GPU in FLOP/s, the better of jax's and torch's.

    Args:
        machine: record of the part `machine`.
    """
    rows = machine.get("rows", {})
    rates = [rows.get(name, {}).get("matmul_tflops", {}).get("bf16") for name in ("jax", "torch")]
    known = [rate for rate in rates if rate]
    return 1e12 * max(known) if known else None


def examples_per_second(row: Row) -> float:
    """Return the examples per second and GPU."""
    return row["batch_per_gpu"] / row["seconds_per_step"]


def utilisation(flops_per_example: float, examples_per_second: float, rate: float) -> float:
    """Return the model FLOP utilisation of a GPU: operations per second over the rate it reaches in a product.

    >>> utilisation(6e9, 1e3, 3e13)
    0.2
    """
    return flops_per_example * examples_per_second / rate


def table(record: Mapping[str, Any], machine: Mapping[str, Any]) -> list[Row]:
    """Return a row for every contender that was measured.

    Args:
        record: record of this part.
        machine: record of the part `machine`; without it there is no utilisation.
    """
    rows, rate = record.get("rows", {}), bf16_rate(machine)
    measured = [
        (job, contender, rows[row_name(job, contender)])
        for job in jobs(False)
        for contender in CONTENDERS
        if "seconds_per_step" in rows.get(row_name(job, contender), {})
    ]
    table = []
    for job, contender, row in measured:
        speed, flops = examples_per_second(row), rows.get(FLOPS, {}).get(job)
        share = utilisation(flops, speed, rate) if flops and rate else None
        table.append({"job": job, "contender": contender, "speed": speed, "utilisation": share, **row})
    return table


if __name__ == "__main__":
    part.run("utilisation", measure)
