"""Speeds and utilisation of the contenders, and the targets on a GPU, from the rows of a record."""

from collections.abc import Callable
from typing import Any

from benchmarks.gpu.jobs import CONTENDERS, FLOPS, jobs, row_name
from benchmarks.gpu.runner import Row
from benchmarks.targets import Record, Target, Values


def speeds(rows: Record) -> list[Row]:
    """Return a row for every contender that was measured.

    It has the examples per second and GPU as "speed", its ratio to torch DDP's, and the model FLOP utilisation:
    operations per second over the rate of a bf16 product. Numbers are None where a part of them was not measured.
    """
    measured = rows.get("utilisation", {})
    tflops = rows.get("machine", {}).get("rates", {}).get("matmul_tflops", {}).get("bf16")

    def speed(job: str, contender: str) -> float | None:
        row = measured.get(row_name(job, contender), {})
        return row["batch_per_gpu"] / row["seconds_per_step"] if "seconds_per_step" in row else None

    table = []
    for job, contender in ((job, contender) for job in jobs(False) for contender in CONTENDERS):
        if (here := speed(job, contender)) is not None:
            flops, torch = measured.get(FLOPS, {}).get(job), speed(job, "torch")
            table.append(
                {
                    "job": job,
                    "contender": contender,
                    "speed": here,
                    "over_torch": here / torch if torch else None,
                    "utilisation": flops * here / tflops / 1e12 if flops and tflops else None,
                    **measured[row_name(job, contender)],
                }
            )
    return table


def _against(peer: str) -> Callable[[Record], Values]:
    """Return the speed of jaxddp as it comes over that of a peer, by job."""

    def values(rows: Record) -> Values:
        known = {(row["job"], row["contender"]): row["speed"] for row in speeds(rows)}
        found = [job for job, contender in known if contender == "jaxddp" and (job, peer) in known]
        return {job: float(f"{known[job, 'jaxddp'] / known[job, peer]:.4g}") for job in found}

    return values


def _utilisation(rows: Record) -> Values:
    return {
        row["job"]: float(f"{row['utilisation']:.3g}")
        for row in speeds(rows)
        if (row["job"], row["contender"]) == ("decoder", "jaxddp") and row["utilisation"] is not None
    }


TARGETS = (
    Target("G1", "x the speed of torch DDP", 1.3, True, _against("torch")),
    Target("G2", "x the speed of torch.compile", 1.0, True, _against("torch_compile")),
    Target("G3", "of the measured bf16 rate on the decoder", 0.5, True, _utilisation),
)


def targets(rows: Record) -> list[dict[str, Any]]:
    """Return the rows of all targets."""
    return [target.row(rows) for target in TARGETS]


def lines(rows: Record) -> list[str]:
    """Return a line for each target, for the console.

    >>> lines({})[0]
    'G1  at least 1.3 x the speed of torch DDP: not measured'
    """
    return [f"{row['id']}  at least {row['limit']:g} {row['text']}: {_of_worst(row)}" for row in targets(rows)]


def _of_worst(row: Row) -> str:
    return "not measured" if row["value"] is None else f"{row['value']:.3g} ({row['of']})"
