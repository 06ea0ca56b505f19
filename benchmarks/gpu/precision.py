"""Part `precision`: how far float32, TF32 and bf16 gradients are from float64, in jax and in torch."""

import tempfile
from pathlib import Path

from benchmarks.gpu import part
from benchmarks.gpu.children import SHARED_GPU, ask
from benchmarks.gpu.gradients import EXACT, MODES, WORKLOADS, error, file_of, load
from benchmarks.gpu.records import FAILURE, Record, Row

SAME = 1e-10  # largest difference of the frameworks' float64 gradients; measured on CPU: 9e-16
TIMEOUT = 120.0


def measure(record: Record) -> None:
    """Compute all gradients in both frameworks, from equal weights, and compare them."""
    record.add("gradients", lambda: _compared(record.smoke))


def _compared(smoke: bool) -> Row:
    with tempfile.TemporaryDirectory(prefix="gpu-gradients-") as name:
        for framework in ("jax", "torch"):
            words = [name, *(["--smoke"] if smoke else [])]
            ask(f"benchmarks.gpu.gradients_{framework}", words, SHARED_GPU, TIMEOUT)
        return errors(Path(name))


def errors(folder: Path) -> Row:
    """Return the relative errors against each framework's float64, from the files in a folder."""
    table: list[Row] = []
    for workload in WORKLOADS:
        exact = {framework: load(file_of(folder, framework, workload, EXACT)) for framework in ("jax", "torch")}
        of_modes = {
            mode: {name: error(load(file_of(folder, name, workload, mode)), exact[name]) for name in exact}
            for mode in MODES
        }
        table.append({"workload": workload, "float64": error(exact["jax"], exact["torch"]), **of_modes})
    far = ", ".join(str(of["workload"]) for of in table if not of["float64"] <= SAME)
    failure: Row = {FAILURE: f"float64 gradients of jax and torch differ: {far}"} if far else {}
    return {"errors": table, **failure}


if __name__ == "__main__":
    part.run("precision", measure)
