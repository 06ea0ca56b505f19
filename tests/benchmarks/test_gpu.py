"""`make gpu`: parts that crash, hang and go on, its arithmetic, the trace, and the page, without a GPU."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.gpu.children import ChildFailed, ask, run
from benchmarks.gpu.fitting import NothingFits, largest_that_fits
from benchmarks.gpu.gradients import EXACT, MODES, WORKLOADS, file_of, save
from benchmarks.gpu.records import Record

from benchmarks.gpu import __main__ as command_line
from benchmarks.gpu import goals, gpus, page, precision, records, runner, trace, utilisation
from benchmarks.gpu.timing import best_seconds, median_seconds
from tests.support.gpu_trace import gpu_trace

ROOT = Path(__file__).parents[2]
COMPLETE = "import json, sys; json.dump({'part': sys.argv[2], 'complete': True, 'smoke': True}, open(sys.argv[1], 'w'))"
CRASH = "print('before'); raise MemoryError('too little')"


class Parts:
    """Stand-ins for the parts: programs by part, and the parts that have run."""

    def __init__(self, folder: Path, **programs: str):
        self.folder, self.programs = folder, programs
        self.ran: list[str] = []

    def command(self, part: str) -> list[str]:
        self.ran.append(part)
        path = records.path_of(self.folder, part)
        return [sys.executable, "-c", self.programs.get(part, COMPLETE), str(path), part]

    def run(self, *parts: str, minutes: float = 1.0, smoke: bool = True) -> dict[str, runner.Ending]:
        endings = runner.run(self.folder, parts, minutes, smoke, self.command)
        return {ending.part: ending for ending in endings}


def test_a_second_run_repeats_what_failed_and_keeps_the_rest(tmp_path: Path) -> None:
    parts = Parts(tmp_path, parity=CRASH)
    first = parts.run("machine", "parity", "tests")
    assert {name: ending.complete for name, ending in first.items()} == {
        **{"machine": True, "parity": False, "tests": True, "page": True}
    }
    again = Parts(tmp_path)
    second = again.run("machine", "parity", "tests")
    assert [name for name, ending in second.items() if ending.text.startswith("kept")] == ["machine", "tests"]
    assert all(ending.complete for ending in second.values())


def test_a_record_of_a_smoke_run_is_not_kept_for_a_real_one(tmp_path: Path) -> None:
    Parts(tmp_path).run("machine")
    ending = Parts(tmp_path).run("machine", smoke=False)["machine"]
    assert not ending.complete and not ending.text.startswith("kept")


def test_a_crash_is_recorded_with_its_last_lines_and_the_others_go_on(tmp_path: Path) -> None:
    parts = Parts(tmp_path, machine=CRASH)
    endings = parts.run("machine", "profile")
    assert endings["machine"].text == "exit code 1; MemoryError: too little"
    record = records.read(tmp_path, "machine")
    assert record["failure"] == "exit code 1" and record["last_lines"][0] == "before"
    assert endings["profile"].complete and parts.ran[-1] == "page"


def test_a_part_that_hangs_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    child = f"import time, pathlib\nwhile True: pathlib.Path({str(alive)!r}).touch(); time.sleep(0.05)"
    hang = f"import subprocess, sys; print('hanging', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    ending = Parts(tmp_path, machine=hang).run("machine", minutes=0.08)["machine"]
    assert ending.text.startswith("stopped after 4 s; hanging")
    assert records.read(tmp_path, "machine")["failure"].startswith("stopped after")
    assert alive.exists()
    alive.unlink()
    time.sleep(0.3)
    assert not alive.exists()


def test_a_program_that_ends_well_without_its_record_has_failed(tmp_path: Path) -> None:
    ending = Parts(tmp_path, machine="print('nothing')").run("machine")["machine"]
    assert not ending.complete and ending.text == "exit code 0; nothing"


def test_time_that_a_part_leaves_goes_to_the_parts_after_it() -> None:
    assert runner.share(["utilisation", "profile", "page"], 780) == 780 * 9 / 13
    assert runner.share(["machine", "page"], -5) == 0 and runner.share(["page"], -5) == 60
    assert sum(runner.PARTS.values()) == command_line.Options.minutes


def test_rows_are_kept_as_they_end_and_failed_ones_are_measured_again(tmp_path: Path) -> None:
    def crash() -> dict[str, Any]:
        raise ChildFailed("too little memory")

    record = Record(tmp_path, "parity", smoke=True)
    record.add("a", lambda: {"value": 1})
    assert records.read(tmp_path, "parity")["rows"]["a"]["value"] == 1
    record.add("b", crash)
    assert record.close() == {"b": "too little memory"}
    failed = records.read(tmp_path, "parity")
    assert failed["failure"] == "1 of 2 rows failed: b: too little memory" and not failed["complete"]

    again = Record(tmp_path, "parity", smoke=True)
    again.add("a", lambda: {"value": 2})
    again.add("b", lambda: {"value": 3})
    assert not again.close()
    rows = records.read(tmp_path, "parity")["rows"]
    assert [rows[name]["value"] for name in "ab"] == [1, 3]
    assert Record(tmp_path, "parity", smoke=False).rows == {}


def test_rows_of_a_part_that_crashes_are_kept(tmp_path: Path) -> None:
    Record(tmp_path, "machine", smoke=True).add("a", lambda: {"value": 1})
    Parts(tmp_path, machine=CRASH).run("machine")
    record = records.read(tmp_path, "machine")
    assert record["rows"]["a"]["value"] == 1 and not record["complete"]


def test_a_crash_is_not_taken_for_an_earlier_failure(tmp_path: Path) -> None:
    earlier = {"part": "machine", "complete": False, "smoke": True, "rows": {}, "failure": "of yesterday"}
    records.write(tmp_path, "machine", earlier)
    ending = Parts(tmp_path, machine=CRASH).run("machine")["machine"]
    assert ending.text == "exit code 1; MemoryError: too little"


def test_a_child_that_fails_is_named_with_its_last_line() -> None:
    with pytest.raises(ChildFailed, match="exit code 1: ZeroDivisionError: division by zero"):
        run(["-c", "1 / 0"])
    with pytest.raises(ChildFailed, match="has not ended after 1 s"):
        run(["-c", "import time; time.sleep(60)"], timeout=1)
    with pytest.raises(ChildFailed, match="printed no JSON"):
        ask("this", [])
    assert run(["-c", "raise SystemExit(1)"], expected=(0, 1)) == ""


def made_up(tmp_path: Path) -> Path:
    """Write records of all parts with made-up numbers."""
    rates = {"device": "NVIDIA H200", "count": 1, "matmul_tflops": {"bf16": 750.0}, "copy_gb_per_second": 4000.0}
    hardware = {"gpus": [{"name": "NVIDIA H200"}], "cores": 16, "processor": "x86_64", "topology": ["GPU0 X"]}
    speeds = {"jaxddp": 0.2, "torch": 0.3, "torch_compile": 0.25}
    stages = {"loss": 1e-16, "update": 2e-15}
    case = {
        "name": "port|1",
        "verdict": "equal",
        "residuals": stages,
        "rounding": {"loss": {"jax": 1e-7, "torch": 2e-7}},
    }
    error = {mode: {"jax": 1e-7, "torch": 2e-7} for mode in MODES}
    profile = trace.analysis(gpu_trace()) | {"steps": 5, "batch_per_gpu": 16, "gpus": 1}
    parts: dict[str, dict[str, Any]] = {
        "machine": {"hardware": hardware, "versions": {"jax": "0.11.2"}, "jax": rates, "torch": rates},
        "parity": {"models": {"cases": [case]}, "port": {"unavailable": "left out"}},
        "precision": {"gradients": {"errors": [{"workload": "wide_mlp", **error}]}},
        "tests": {"core": {"tests": 3, "passed": 2, "skipped": 1, "failed": []}},
        "utilisation": {
            "flops": {"decoder": 9e11},
            **{
                f"decoder, {name}": {"batch_per_gpu": 64, "seconds_per_step": seconds, "peak_bytes": 5e10}
                for name, seconds in speeds.items()
            },
        },
        "profile": {"decoder": profile},
    }
    for part, rows in parts.items():
        written = {"part": part, "complete": True, "smoke": False, "date": "2026-01-02", "seconds": 1.0, "rows": rows}
        records.write(tmp_path, part, written)
    return tmp_path


def test_utilisation_is_operations_over_the_best_measured_rate(tmp_path: Path) -> None:
    folder = made_up(tmp_path)
    record, machine = (records.read(folder, part) for part in ("utilisation", "machine"))
    rows = {row["contender"]: row for row in utilisation.table(record, machine)}
    assert rows["jaxddp"]["speed"] == 320 and rows["jaxddp"]["utilisation"] == pytest.approx(9e11 * 320 / 750e12)
    machine["rows"]["torch"]["matmul_tflops"] = {"bf16": 1500.0}
    assert utilisation.table(record, machine)[0]["utilisation"] == pytest.approx(0.192)
    assert utilisation.table(record, {})[0]["utilisation"] is None


def test_targets_are_met_or_missed_by_jaxddp_as_it_comes(tmp_path: Path) -> None:
    folder = made_up(tmp_path)
    read = {part: records.read(folder, part) for part in runner.PARTS}
    rows = {row["id"]: row for row in goals.rows(read)}
    assert {name: (row["value"], row["met"]) for name, row in rows.items()} == {
        **{"G1": (1.5, True), "G2": (1.25, True), "G3": (0.384, False)}
    }
    assert {row["met"] for row in goals.rows({})} == {None}


def test_the_page_shows_every_part(tmp_path: Path) -> None:
    lines = page.write(made_up(tmp_path))
    assert lines[0] == "G1  at least 1.3 x the speed of torch DDP: 1.5 (decoder)"
    markdown, html = ((tmp_path / name).read_text() for name in ("README.md", "index.html"))
    for text in ("NVIDIA H200", "38.4%", "2e-15 (update)", "kernels run 80.0%", "missed", "left out", "GPU0 X"):
        assert text in markdown and text in html, text
    assert "port\\|1" in markdown and "| benchmark | not measured" in markdown
    assert 'src="data:image/png;base64,' in html and (tmp_path / page.PICTURE).read_bytes()[:4] == b"\x89PNG"
    assert "mean nothing" not in markdown


def test_the_page_of_an_empty_folder_says_that_nothing_was_measured(tmp_path: Path) -> None:
    page.write(tmp_path)
    markdown = (tmp_path / "README.md").read_text()
    assert "device not measured" in markdown and markdown.count("\nnot measured\n") == len(runner.PARTS) - 1


def test_the_page_says_what_failed_and_escapes_it(tmp_path: Path) -> None:
    failed = {"part": "parity", "complete": False, "smoke": True, "failure": "exit code 1: <module>", "rows": {}}
    records.write(tmp_path, "parity", failed)
    page.write(tmp_path)
    assert "Incomplete: exit code 1: &lt;module&gt;" in (tmp_path / "index.html").read_text()


def test_the_largest_batch_that_fits_is_measured() -> None:
    def measure(size: int) -> dict[str, Any]:
        if size > 16:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
        return {"seconds_per_step": 0.1}

    freed: list[int] = []
    found = largest_that_fits([64, 32, 16, 8], measure, lambda: freed.append(1))
    assert found == {"batch_per_gpu": 16, "too_large": [64, 32], "seconds_per_step": 0.1} and len(freed) == 2
    with pytest.raises(NothingFits, match="64, 32 examples"):
        largest_that_fits([64, 32], measure, lambda: None)
    with pytest.raises(ZeroDivisionError):
        largest_that_fits([8], lambda size: {"x": size / 0}, lambda: None)


def test_times_are_those_of_a_step() -> None:
    calls: list[int] = []

    def work(steps: int) -> None:
        calls.append(steps)
        time.sleep(0.001 * steps)

    assert median_seconds(work, 0.01, rounds=3) >= 0.001 and len(calls) == 2 + 3
    assert best_seconds(work, calls=2, repeats=2) >= 0.001 and calls[-3:] == [1, 2, 2]


def test_gradients_that_differ_in_float64_fail_the_precision(tmp_path: Path) -> None:
    for workload in WORKLOADS:
        for framework in ("jax", "torch"):
            for mode in (EXACT, *MODES):
                save(file_of(tmp_path, framework, workload, mode), {"w": np.array([3.0, 4.0])})
        save(file_of(tmp_path, "jax", workload, "tf32"), {"w": np.array([3.0, 4.5])})
    row = precision.errors(tmp_path)
    assert row["errors"][0]["tf32"] == {"jax": 0.1, "torch": 0.0} and "failure" not in row
    save(file_of(tmp_path, "jax", WORKLOADS[0], EXACT), {"w": np.array([3.0, 4.0 + 1e-8])})
    assert precision.errors(tmp_path)["failure"].endswith(f"differ: {WORKLOADS[0]}")


def listed(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    monkeypatch.setattr(gpus, "smi", lambda *words: text)


def test_the_gpus_that_are_visible_count(monkeypatch: pytest.MonkeyPatch) -> None:
    listed(monkeypatch, "".join(f"GPU {number}: NVIDIA H200 (UUID: GPU-1)\n" for number in range(8)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus.names() == ["NVIDIA H200"] * 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert len(gpus.names()) == 2
    listed(monkeypatch, None)
    assert gpus.names() == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "no GPU: nvidia-smi lists none here; --smoke tries everything on CPU devices"),
        ("--parts pariti", "--parts pariti: unknown; did you mean parity?"),
        ("--minutes 0", "--minutes 0: must be above 0"),
        ("--smoek", "--smoek: unknown flag; did you mean --smoke?"),
        ("--output pyproject.toml", "--output pyproject.toml: is a file; must be a folder"),
    ],
)
def test_a_bad_flag_gives_one_line_and_exit_code_2(
    flags: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed(monkeypatch, None)
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stop:
        command_line.main(flags.split())
    printed = capsys.readouterr()
    assert stop.value.code == 2 and printed.out == ""
    assert printed.err.startswith(f"error: {message}") and printed.err.count("\n") == 1


@pytest.mark.parametrize(("program", "code"), [(COMPLETE, 0), (CRASH, 1)])
def test_the_exit_code_says_whether_all_parts_are_complete(
    program: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(tmp_path, machine=program)
    monkeypatch.setattr(runner, "module_command", lambda part, folder, smoke: parts.command(part))
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # a smoke run changes it
    assert command_line.main(["--smoke", "--parts", "machine", "--output", str(tmp_path)]) == code


@pytest.mark.large
def test_the_smoke_run_measures_every_part(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--smoke", "--output", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    markdown = (tmp_path / "README.md").read_text()
    assert "mean nothing" in markdown and "\nnot measured\n" not in markdown
    for part in runner.PARTS:
        assert records.is_complete(records.read(tmp_path, part), smoke=True)
