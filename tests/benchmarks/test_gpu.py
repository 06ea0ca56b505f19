"""`make gpu`: children that crash and hang, runs that go on, arithmetic, traces, and the page, without a GPU."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.child import ChildFailed, call
from benchmarks.gpu import __main__ as command_line
from benchmarks.gpu import goals, machine, page, precision, runner, suite
from benchmarks.gpu.measurements import PARTS, Measurement, measurements
from benchmarks.gpu.precision import EXACT, MODES
from benchmarks.gpu.runner import FAILURE, GpuRecord, Rows
from benchmarks.gpu.timing import best_seconds, largest_that_fits, median_seconds

ROOT = Path(__file__).parents[2]


def test_a_child_returns_what_its_function_does(tmp_path: Path) -> None:
    assert call("textwrap", "fill", {"text": "a b", "width": 1}, tmp_path / "log", 60) == "a\nb"


def test_a_child_that_fails_says_so_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(ChildFailed, match=r"exit code 1; TypeError: fill\(\) missing 1 required"):
        call("textwrap", "fill", {}, tmp_path / "log", 60)


@pytest.mark.large
def test_a_child_that_hangs_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    program = f"import pathlib; print(1, flush=True)\nwhile 1: pathlib.Path({str(alive)!r}).touch()  # hangs"
    with pytest.raises(ChildFailed, match="stopped after 4 s; 1"):
        call("subprocess", "run", {"args": [sys.executable, "-c", program]}, tmp_path / "log", 4)
    assert alive.exists()
    alive.unlink()
    time.sleep(0.3)
    assert not alive.exists()


class Children:
    """Stand-ins for the children: the row of each module, or why it fails; and what was called, with its limit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **rows: dict[str, Any] | str):
        self._rows, self.called = rows, dict[str, float]()
        monkeypatch.setattr(runner, "call", self._call)

    def _call(self, module: str, function: str, arguments: object, log: Path, limit: float, env: object) -> Any:
        name = module.removeprefix("benchmarks.")
        self.called[name] = limit
        row = self._rows.get(name, {"value": 1})
        if isinstance(row, str):
            raise ChildFailed(row)
        return row


A, B, C = (Measurement("machine", name, seconds, name) for name, seconds in (("a", 10), ("b", 20), ("c", 30)))


def test_a_second_run_repeats_what_failed_and_keeps_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Children(monkeypatch, b="exit code 1; MemoryError", c={FAILURE: "2 of 3 checks are not equal"})
    first = runner.run(tmp_path, [A, B, C], 1.0, smoke=True)
    assert first.failures(["machine"]) == [
        "machine, b: exit code 1; MemoryError",
        "machine, c: 2 of 3 checks are not equal",
    ]
    again = Children(monkeypatch)
    second = runner.run(tmp_path, [A, B, C], 1.0, smoke=True)
    assert list(again.called) == ["b", "c"] and not second.failures(["machine"])
    assert re.search(r"^machine, a +0 s  kept from an earlier run$", capsys.readouterr().out, re.MULTILINE)


def test_rows_are_written_as_they_end_and_those_of_a_smoke_run_are_not_kept_for_a_real_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Children(monkeypatch)
    runner.run(tmp_path, [A], 1.0, smoke=True)
    assert json.loads((tmp_path / "record.json").read_text())["rows"]["machine"]["a"]["value"] == 1
    assert GpuRecord(tmp_path, smoke=True).has(A) and not GpuRecord(tmp_path, smoke=False).has(A)


def test_time_that_a_measurement_leaves_goes_to_those_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(monkeypatch)
    runner.run(tmp_path, [A, B, C], 1.0, smoke=True)
    assert children.called == pytest.approx({"a": 2 * 10, "b": 2 * 60 * 20 / 50, "c": 60}, rel=0.01)


@pytest.mark.parametrize("smoke", [False, True])
def test_every_part_is_measured_in_the_time_of_all(smoke: bool, tmp_path: Path) -> None:
    listed = measurements(tmp_path, smoke, 1)
    assert list(dict.fromkeys(one.part for one in listed)) == list(PARTS)
    assert sum(one.seconds for one in listed) <= 60 * command_line.GpuOptions.minutes
    assert len({(one.part, one.name) for one in listed}) == len(listed)


def made_up() -> Rows:
    """Return rows of all parts but the benchmark, with made-up numbers."""
    rates = {"device": "NVIDIA H200", "count": 1, "matmul_tflops": {"bf16": 750.0}, "copy_gb_per_second": 4000.0}
    hardware = {"date": "2026-01-02", "gpus": [{"name": "NVIDIA H200"}], "cores": 16, "processor": "x86_64"}
    hardware |= {"topology": ["GPU0 X"], "versions": {"jax": "0.11.2"}}
    case = {"name": "port|1", "verdict": "equal", "residuals": {"loss": 1e-16, "update": 2e-15}}
    case |= {"rounding": {"loss": {"jax": 1e-7, "torch": 2e-7}}}
    profile = {
        "steps": 5,
        "batch_per_gpu": 16,
        "window_ms": 0.1,
        "busy_share": {"GPU": 0.8},
        "communication_share": 0.2,
    }
    profile |= {"kernels": [{"name": "k" * 100, "calls": 2, "ms": 0.06, "share": 0.6667}]}
    profile |= {"gaps": [{"ms": 0.01, "at_ms": 0.05, "before": "gemm", "after": "adam"}]}
    speeds = {"jaxddp": 0.2, "torch": 0.3, "torch_compile": 0.25}
    return {
        "machine": {"hardware": hardware, "rates": rates},
        "parity": {"models": {"cases": [case]}},
        "precision": {
            "jax": {},
            "torch": {"errors": {"wide_mlp": {mode: {"jax": 1e-7, "torch": 2e-7} for mode in MODES}}},
        },
        "tests": {"core": {"passed": 2, "skipped": 1, "failed": []}},
        "utilisation": {
            "flops": {"decoder": 9e11},
            **{
                f"decoder, {name}": {"batch_per_gpu": 64, "seconds_per_step": seconds, "peak_bytes": 5e10}
                for name, seconds in speeds.items()
            },
        },
        "profile": {"decoder": profile},
    }


def test_utilisation_is_operations_over_the_measured_rate() -> None:
    rows = made_up()
    found = {row["contender"]: row for row in goals.speeds(rows)}
    assert found["jaxddp"]["speed"] == 320 and found["jaxddp"]["utilisation"] == pytest.approx(9e11 * 320 / 750e12)
    del rows["machine"]
    assert goals.speeds(rows)[0]["utilisation"] is None


def test_targets_are_met_or_missed_by_jaxddp_as_it_comes() -> None:
    rows = {row["id"]: row for row in goals.targets(made_up())}
    assert {name: (row["value"], row["met"]) for name, row in rows.items()} == {
        **{"G1": (1.5, True), "G2": (1.25, True), "G3": (0.384, False)}
    }
    assert {row["met"] for row in goals.targets({})} == {None}


def written(folder: Path, rows: Rows, smoke: bool) -> str:
    """Return the page of some rows."""
    (folder / "record.json").write_text(json.dumps({"smoke": smoke, "rows": rows}))
    page.write(folder, GpuRecord(folder, smoke))
    return re.sub(" +", " ", (folder / page.NAME).read_text())  # without the alignment of tables


def test_the_page_shows_every_part(tmp_path: Path) -> None:
    text = written(tmp_path, made_up(), smoke=False)
    assert text.startswith("# jaxddp · 1 x NVIDIA H200 · 2026-01-02\n")
    assert "\n- G1 at least 1.3 x the speed of torch DDP: 1.5 (decoder)\n" in text
    for part in ("| 0.384 |", "| 2e-15 |", "busy_share GPU", "GPU0 X", "port\\|1", "| core | 2 | 1 |", "kkk..."):
        assert part in text, part
    assert text.count("\nnot measured\n") == 1  # the benchmark
    assert "mean nothing" not in text and "Failed" not in text


def test_the_page_says_what_failed_and_was_not_measured(tmp_path: Path) -> None:
    failed = {"parity": {"models": {FAILURE: "exit code 1; KeyError", "took_seconds": 1.0}}}
    text = written(tmp_path, failed, smoke=True)
    assert "\n- parity, models: exit code 1; KeyError\n" in text
    assert "device not measured" in text and text.count("\nnot measured\n") == len(PARTS)
    assert "mean nothing" in text


def test_the_largest_batch_that_fits_is_measured() -> None:
    def measure(size: int) -> dict[str, Any]:
        if size > 16:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
        return {"seconds_per_step": 0.1}

    freed: list[int] = []
    found = largest_that_fits([64, 32, 16, 8], measure, lambda: freed.append(1))
    assert found == {"batch_per_gpu": 16, "too_large": [64, 32], "seconds_per_step": 0.1} and len(freed) == 2
    with pytest.raises(MemoryError, match="64, 32 examples"):
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


def test_gradients_are_compared_within_a_framework_and_must_agree_in_float64() -> None:
    right = {mode: {"w": np.array([3.0, 4.0])} for mode in (EXACT, *MODES)}
    row = precision.row({"mlp": precision.errors({**right, "tf32": {"w": np.array([3.0, 4.5])}}, right)})
    assert row["errors"]["mlp"]["tf32"] == {"jax": 0.1, "torch": 0.0} and FAILURE not in row
    wrong = {mode: {"w": array["w"] + [0, 1e-8]} for mode, array in right.items()}
    assert precision.row({"mlp": precision.errors(wrong, right)})[FAILURE].endswith("differ: mlp")


@pytest.mark.parametrize(
    ("outcomes", "row"),
    [
        (("passed", "skipped"), {"passed": 1, "skipped": 1, "failed": []}),
        (("passed", "failed"), {"passed": 1, "skipped": 0, "failed": ["b"], FAILURE: "1 of 2 tests failed: b"}),
        (("skipped",), {"passed": 0, "skipped": 1, "failed": [], FAILURE: "no test ran"}),
    ],
)
def test_tests_are_counted_and_those_that_fail_are_named(outcomes: tuple[Any, ...], row: Mapping[str, Any]) -> None:
    found = suite.Outcomes()
    for name, outcome in zip("ab", outcomes, strict=False):
        for when in ("setup", "call", "teardown"):
            said = outcome if when == "call" else "passed"
            found.pytest_runtest_logreport(pytest.TestReport(name, ("", None, ""), {}, said, None, when))  # type: ignore[arg-type]
    assert found.row() == row


def test_the_gpus_that_are_visible_count(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "".join(f"GPU {number}: NVIDIA H200 (UUID: GPU-1)\n" for number in range(8))
    for text, visible, count in ((listed, None, 8), (listed, "0,3", 2), (listed, "", 0), (None, None, 0)):
        monkeypatch.setattr(machine, "smi", lambda *_, text=text: text)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert machine.names() == ["NVIDIA H200"] * count


@pytest.mark.parametrize("failure", [None, "exit code 1; MemoryError"])
def test_the_exit_code_says_whether_a_measurement_failed(
    failure: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "measurements", lambda *_: [A])
    Children(monkeypatch, a=failure or {})
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # a smoke run changes it
    code = command_line.main(["--smoke", "--parts", "machine", "--output", str(tmp_path)])
    assert code == (failure is not None)


@pytest.mark.large
def test_the_smoke_run_measures_every_part(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--smoke", "--output", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    markdown = (tmp_path / page.NAME).read_text()
    assert "mean nothing" in markdown and "\nnot measured\n" not in markdown
    assert all(GpuRecord(tmp_path, smoke=True).has(one) for one in measurements(tmp_path, True, 0))
