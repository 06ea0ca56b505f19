"""A check that is ended early reports what it has found, says what it has not done, and leaves nothing behind."""

import multiprocessing
import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from jaxddp.parity.checking import check
from jaxddp.parity.progress import CAUSES, DRAW, FLOAT32, FORCED, FREE, Progress
from jaxddp.parity.report.json_form import from_json
from jaxddp.parity.report.report import Report
from tests.support.small_port import at_start_of, write
from tests.support.waiting import wait_for

pytestmark = pytest.mark.large
STEPS = 4
SLOW = at_start_of("batch(step, rank)", "time.sleep(0.4 * (step > 0))")
OTHER_LOSS = ("nnx.tanh(self.fc1(x))", "nnx.gelu(self.fc1(x))")


class Scratch:
    """An empty folder of temporary files, and the processes that other tests keep."""

    def __init__(self, folder: Path):
        self.folder, self._kept = folder, {*multiprocessing.active_children()}

    def left_behind(self) -> list[str]:
        """Return what a check has left: children of this process, and files."""
        # multiprocessing's server, which lives as long as this process, and torch have theirs.
        files = [path.name for path in self.folder.iterdir() if not path.name.startswith(("pymp-", "torchinductor_"))]
        return files + [child.name for child in multiprocessing.active_children() if child not in self._kept]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scratch:
    """Return the folder of temporary files."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return Scratch(folder)


def ended_in(stage: str, steps: int, port: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Report:
    """Check a port on one replica, and ask for the end once both sides have taken some steps of a stage."""
    watch = Progress.watch

    def watch_and_end(self: Progress, workers: Any) -> None:
        if self._stage == stage and min(self._counts.values(), default=0) >= steps:
            self.stop.why = "Ctrl-C"
        watch(self, workers)

    monkeypatch.setattr(Progress, "watch", watch_and_end)
    return check(port, world_size=1, steps=STEPS, platform="cpu", **options)


@pytest.mark.parametrize(
    ("stage", "steps", "untried"),
    [
        (DRAW, 0, (DRAW, FREE, FORCED, FLOAT32)),
        (FREE, 2, (f"{FREE}, from step ", FORCED, FLOAT32)),
        (FLOAT32, 1, (f"{FLOAT32}, from step ",)),
    ],
)
def test_each_run_can_be_ended(
    stage: str, steps: int, untried: tuple[str, ...], tmp_path: Path, scratch: Scratch, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = ended_in(stage, steps, write(tmp_path, SLOW), monkeypatch)
    assert (report.verdict, report.ended, report.problems) == ("incomplete", "Ctrl-C", ())
    assert len(report.untried) == len(untried)
    assert all(found.startswith(expected) for found, expected in zip(report.untried, untried, strict=True))
    assert {len(result.residuals) for result in report.stages.values()} == ({STEPS} if stage == FLOAT32 else set())
    assert all(len(result.residuals) >= 2 for result in report.free_running.values())
    assert bool(report.free_running) == (stage != DRAW)
    expected = {DRAW: "Nothing was compared.", FREE: "each side running by itself.", FLOAT32: "is allowed."}[stage]
    assert f"incomplete: Ended early by Ctrl-C, after {report.seconds:.0f} s; not done: {untried[0]}" in str(report)
    assert expected in " ".join(str(report).split())
    assert scratch.left_behind() == []


def test_a_search_in_torchs_process_can_be_ended(
    tmp_path: Path, scratch: Scratch, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = ended_in(CAUSES, 0, write(tmp_path, OTHER_LOSS), monkeypatch, numerics=False)
    assert (report.verdict, report.ended, report.untried) == ("different", "Ctrl-C", (CAUSES,))
    assert [one.stage for one in report.differences] == ["local_loss"] and report.differences[0].cause is None
    assert scratch.left_behind() == []


def test_a_limit_ends_a_check_in_another_thread(tmp_path: Path, scratch: Scratch) -> None:
    port, reports, lines = write(tmp_path, at_start_of("batch(step, rank)", "time.sleep(1000)")), [], list[str]()

    def run() -> None:
        reports.append(check(port, world_size=1, steps=STEPS, platform="cpu", time_limit=3.0, tell=lines.append))

    thread, began = threading.Thread(target=run), time.monotonic()
    thread.start()
    thread.join(timeout=120)
    assert reports and time.monotonic() - began < 60
    assert (reports[0].ended, reports[0].untried[0]) == ("the limit of 3 s", DRAW)
    assert scratch.left_behind() == []


def test_ctrl_c_at_a_terminal_ends_the_command_with_its_files(tmp_path: Path, scratch: Scratch) -> None:
    """All processes of the terminal get the signal, as of a real one."""
    port, mark = write(tmp_path, SLOW), f"MARK={tmp_path}"
    command = [sys.executable, "-m", "jaxddp.parity", port, "--devices", "2", "--steps", str(STEPS)]
    files = ["--json", tmp_path / "found.json", "--report", tmp_path / "page.html", "--platform", "cpu"]
    ours, terminal = pty.openpty()
    shown: list[bytes] = []
    env = os.environ | dict([mark.split("=")])
    run = subprocess.Popen([*command, *files], stdout=subprocess.PIPE, stderr=terminal, env=env, start_new_session=True)
    os.close(terminal)
    reader = threading.Thread(target=read_all, args=(ours, shown))
    reader.start()
    wait_for(lambda: [*scratch.folder.glob("jaxddp-parity-*/jax64/000001.safetensors")], [run], lambda: shown)
    os.killpg(run.pid, signal.SIGINT)
    printed = run.communicate(timeout=60)[0].decode()
    reader.join()
    assert run.returncode == 2
    assert "incomplete: Ended early by Ctrl-C, after" in printed and f"not done: {FORCED}, from step" in printed
    steps = len(from_json((tmp_path / "found.json").read_text()).stages["update"].residuals)
    assert 2 <= steps < STEPS and printed.count(f"equal, {steps}/{STEPS} steps") >= 5
    assert "Ended early by Ctrl-C" in (tmp_path / "page.html").read_text()
    lines = b"".join(shown).decode().replace("\r\n", "\n").split("\r")
    assert any(line.startswith(f"{FREE}: torch ") for line in lines) and lines[-1] == "" and "\n" not in "".join(lines)
    assert scratch.left_behind() == [] and processes_with(mark) == []


def test_ctrl_c_while_modules_are_imported_is_silent(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jaxddp.parity", write(tmp_path)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.monotonic() + 120
    while "numpy" not in Path(f"/proc/{run.pid}/maps").read_text():
        assert time.monotonic() < deadline and run.poll() is None
    os.killpg(run.pid, signal.SIGINT)
    assert (run.communicate()[0], run.returncode) == (b"", -signal.SIGINT)  # not 1, which says "different"


def read_all(file: int, into: list[bytes]) -> None:
    try:
        while read := os.read(file, 4096):
            into.append(read)
    except OSError:  # the other end is closed
        os.close(file)


def processes_with(variable: str) -> list[str]:
    """Return the processes whose environment has a variable."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            if variable.encode() in file.read_bytes().split(b"\0"):
                found.append(file.parent.name)
        except OSError:  # ended, or another user's
            pass
    return found
