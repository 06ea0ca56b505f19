"""Part `parity`: `python -m jaxddp.parity` with jax and torch on the GPU."""

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import gpus, part
from benchmarks.gpu.children import SHARED_GPU, run
from benchmarks.gpu.records import FAILURE, UNAVAILABLE, Record, Row
from jaxddp.parity.report.json_form import from_json
from jaxddp.parity.report.report import Report

PORT = Path("examples", "ports", "residual_convnet.py")
EQUAL_OR_DIFFERENT = (0, 1)  # exit codes of a check that could be made
TIMEOUT = 280.0


def measure(record: Record) -> None:
    """Check the built-in models in float64, and a port in float64 and float32."""
    place = part.platform(record.smoke)
    flags = ["--platform", place, "--torch-platform", place]
    if record.smoke:
        one = ["--world-size", "1", "--only", "mlp sgd x?", "--steps", "1"]
        record.add("models", lambda: _checked(record.folder, "models", [*flags, *one]))
        record.add("port", lambda: {UNAVAILABLE: "left out of a smoke run, in which it would take the longest"})
        return
    count = len(gpus.names())
    record.add("models", lambda: _checked(record.folder, "models", [*flags, *selection(count)]))
    port = [str(PORT), "--world-size", str(world_size(count))]
    record.add("port", lambda: _checked(record.folder, "port", [*port, *flags]))


def world_size(gpus: int) -> int:
    """Return the replicas of a check: jax needs a GPU for each."""
    return min(2, gpus)


def selection(gpus: int) -> list[str]:
    """Return the flags that select the built-in cases which fit on so many GPUs; some have twice the replicas.

    >>> selection(1), selection(8)
    (['--world-size', '1', '--only', '* x1'], ['--world-size', '2'])
    """
    size = world_size(gpus)
    return ["--world-size", str(size), *([] if gpus >= 2 * size else ["--only", f"* x{size}"])]


def _checked(folder: Path, name: str, flags: Sequence[str]) -> Row:
    """Run a check, and summarize its reports."""
    path = folder / f"parity-{name}.json"
    command = ["-m", "jaxddp.parity", *flags, "--json", str(path.absolute())]
    run(command, SHARED_GPU, TIMEOUT, EQUAL_OR_DIFFERENT)
    texts = json.loads(path.read_text())
    return summary([from_json(json.dumps(of_case)) for of_case in (texts if isinstance(texts, list) else [texts])])


def summary(reports: Sequence[Report]) -> Row:
    """Return the verdicts and the largest residuals of some reports, and of ports the rounding in float32."""
    cases = [
        {
            "name": report.port,
            "verdict": report.verdict,
            "residuals": {name: max(stage.residuals) for name, stage in report.stages.items() if stage.residuals},
            "rounding": {name: vars(rounding) for name, rounding in report.numerics.items()},
        }
        for report in reports
    ]
    row: Row = {"cases": cases, "environment": reports[0].environment}
    wrong = [report.port for report in reports if report.verdict != "equal"]
    return row | ({FAILURE: f"{len(wrong)} of {len(cases)} checks are not equal: {wrong[0]}"} if wrong else {})


if __name__ == "__main__":
    part.run("parity", measure)
