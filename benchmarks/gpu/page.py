"""README.md of a folder of results: the targets, what failed, and the rows of each part."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import report, targets
from benchmarks.gpu import goals
from benchmarks.gpu.jobs import CONTENDERS, jobs
from benchmarks.gpu.precision import MODES
from benchmarks.gpu.rates import DTYPES
from benchmarks.gpu.runner import FAILURE, GpuRecord, Row, Rows
from benchmarks.tables import table
from jaxddp.files import write_atomically

NAME = "README.md"
MISSING = "not measured"
SMOKE = "A smoke run on CPU devices with tiny sizes: these numbers mean nothing."
LONGEST_NAME = 70  # of a kernel, whose mangled names can have hundreds of letters

Blocks = Iterator[str]  # paragraphs and tables


def write(folder: Path, record: GpuRecord) -> None:
    """Write the page of a record; parts that were not measured say so."""
    machine = record.rows.get("machine", {})
    device, date = machine.get("jax", {}), machine.get("hardware", {}).get("date")
    named = f"{device['count']} x {device['device']}" if "device" in device else "device not measured"
    blocks = [
        f"# {' · '.join(filter(None, ['jaxddp', named, date]))}",
        *([SMOKE] if record.smoke else []),
        *_targets(record.rows),
    ]
    if failures := record.failures(_PARTS):
        blocks += ["Failed:", "\n".join(f"- {line}" for line in failures)]
    for part, (title, make) in _PARTS.items():
        rows = {name: row for name, row in record.rows.get(part, {}).items() if FAILURE not in row or len(row) > 2}
        blocks += [f"## {title}", *(make(rows, record) if rows else [MISSING])]
    write_atomically(folder / NAME, ("\n\n".join(blocks) + "\n").encode())


def _number(value: Any, form: str = ".4g") -> str:
    return MISSING if value is None else format(value, form)


def _targets(rows: Rows) -> Blocks:
    state = {True: "met", False: "missed", None: MISSING}
    cells = [[line, state[row["met"]]] for line, row in zip(goals.lines(rows), goals.targets(rows), strict=True)]
    yield table(["target", ""], cells)
    yield "Targets are for an H200; of two models the worse counts."


def _machine(rows: dict[str, Row], record: GpuRecord) -> Blocks:
    if hardware := rows.get("hardware"):
        yield f"{hardware['cores']} cores, {hardware['processor']}"
        if gpus := hardware["gpus"]:
            yield table(list(gpus[0]), (gpu.values() for gpu in gpus))
            yield f"```\n{hardware['topology'].rstrip()}\n```"
        yield ", ".join(f"{name} {version}" for name, version in hardware["versions"].items())
    sides = [rows.get(name, {}) for name in ("jax", "torch")]
    products = [side.get("matmul_tflops", {}) for side in sides]
    cells = [[f"{dtype} matrix product, TFLOP/s", *(_number(side.get(dtype)) for side in products)] for dtype in DTYPES]
    for key, text in (
        ("copy_gb_per_second", "memory copy, GB/s read and written"),
        ("all_reduce_gb_per_second", "all-reduce, GB/s bus bandwidth"),
    ):
        cells.append([text, *(_number(side.get(key)) for side in sides)])
    yield table(["measured", "jax", "torch"], cells)


def _utilisation(rows: dict[str, Row], record: GpuRecord) -> Blocks:
    yield "Utilisation: operations of the model's products and convolutions, counted by jaxddp.plan, over the rate."
    measured, descriptions = goals.speeds(record.rows), jobs(record.smoke)
    torchs = {row["job"]: row["speed"] for row in measured if row["contender"] == "torch"}
    cells = []
    for row in measured:
        loaded, bytes_used = row.get("seconds_per_step_with_loader"), row.get("peak_bytes")
        torch = torchs.get(row["job"])
        cells.append(
            [
                f"{descriptions[row['job']].description}: {CONTENDERS[row['contender']].label}",
                row["batch_per_gpu"],
                _number(1e3 * row["seconds_per_step"]),
                _number(1e3 * loaded if loaded else None),
                _number(row["speed"]),
                _number(row["speed"] / torch if torch else None, ".2f"),
                _number(row["utilisation"], ".1%"),
                _number(bytes_used / 1e9 if bytes_used else None, ".1f"),
            ]
        )
    head = ["", "batch per GPU", "ms per step", "with loader", "examples/s per GPU", "x torch DDP", "utilisation"]
    yield table([*head, "peak GB"], cells)


def _profile(rows: dict[str, Row], record: GpuRecord) -> Blocks:
    for name, row in rows.items():
        busy = ", ".join(f"{share:.1%} on {device}" for device, share in row["busy_share"].items())
        sent = f"; messages take {row['communication_share']:.1%}" if row["communication_share"] else ""
        window = f"{row['steps']} steps of {row['batch_per_gpu']} examples in {row['window_ms']:g} ms"
        yield f"{name}: {window}; kernels run {busy} of the time{sent}"
        kernels = ([_cut(one["name"]), one["calls"], one["ms"], f"{one['share']:.1%}"] for one in row["kernels"])
        yield table([f"{name}: kernel", "calls", "ms", "share"], kernels)
        gaps = ([gap["ms"], gap["at_ms"], _cut(gap["before"]), _cut(gap["after"])] for gap in row["gaps"])
        yield table([f"{name}: gap, ms", "at ms", "kernel before", "kernel after"], gaps)


def _cut(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."


def _benchmark(rows: dict[str, Row], record: GpuRecord) -> Blocks:
    """Yield the text of `python -m benchmarks`, as if one run had measured all workloads."""
    merged: dict[str, Any] = {}
    for row in rows.values():
        merged = {**row, **merged}
    merged["races"] = [race for row in rows.values() for race in row["races"]]
    merged["seconds"] = sum(row["seconds"] for row in rows.values())
    merged["targets"] = targets.rows(merged)
    yield f"```\n{report.text(merged)}\n```"


def _parity(rows: dict[str, Row], record: GpuRecord) -> Blocks:
    checks, rounding = [], []
    for case in (case for row in rows.values() for case in row["cases"]):
        residuals = case["residuals"]
        stage = max(residuals, key=residuals.__getitem__, default=None)
        worst = MISSING if stage is None else f"{residuals[stage]:.0e} ({stage})"
        checks.append([case["name"], case["verdict"], worst])
        for of_stage, far in case["rounding"].items():
            rounding.append([case["name"], of_stage, *(f"{far[side]:.1e}" for side in ("jax", "torch"))])
    yield table(["check in float64", "verdict", "largest residual"], checks)
    if rounding:
        yield table(["float32 against the same framework's float64", "stage", "jax", "torch"], rounding)


def _precision(rows: dict[str, Row], record: GpuRecord) -> Blocks:
    yield "Norm of the difference of the gradients from the same framework's in float64, over their norm."
    errors: dict[str, Any] = rows.get("torch", {}).get("errors", {})
    cells = ([name, mode, of[mode]["jax"], of[mode]["torch"]] for name, of in errors.items() for mode in MODES)
    yield table(["model", "", "jax", "torch"], cells)


def _tests(rows: dict[str, Row], record: GpuRecord) -> Blocks:
    cells = ([name, row["passed"], row["skipped"], ", ".join(row["failed"]) or "none"] for name, row in rows.items())
    yield table(["tests", "passed", "skipped", "failed"], cells)


_PARTS: dict[str, tuple[str, Callable[[dict[str, Row], GpuRecord], Iterable[str]]]] = {
    "machine": ("Machine", _machine),
    "utilisation": ("Utilisation in bf16", _utilisation),
    "profile": ("Profile of jaxddp's steps", _profile),
    "benchmark": ("Benchmark: ms per step, and times as long that others take", _benchmark),
    "parity": ("Parity: jax and torch on the GPU", _parity),
    "precision": ("Precision: errors of gradients", _precision),
    "tests": ("Tests", _tests),
}
