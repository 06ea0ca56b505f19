"""`jaxddp check`: exit codes, files, and one-line errors."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxddp.parity import records
from jaxddp.parity.cases import builtin_cases
from jaxddp.parity.command import CheckOptions, _main, run
from jaxddp.parity.diagnosis import differences
from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.findings import EXIT_CODES
from jaxddp.parity.progress import CAUSES, Progress
from jaxddp.parity.report.json_form import from_json, to_json
from jaxddp.parity.stopping import Stop, Stopped
from tests.support.small_port import RENAMED, own_optimizers, write

SIDES = ("torch", "jax")
FEW = ["--steps", "2", "--devices", "1", "--platform", "cpu"]


def exit_code(*argv: str | Path) -> int:
    with pytest.raises(SystemExit) as stop:
        run([str(word) for word in argv])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def line_with(path: Path, code: str) -> int:
    """Return the number of the first line that has some code."""
    return 1 + next(k for k, line in enumerate(path.read_text().splitlines()) if code in line)


def test_a_different_port_gives_exit_code_1_and_files_with_the_printed_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decay = own_optimizers("AdamW(parameters, lr=0.01)", "optax.adamw(0.01, weight_decay=1e-4)")
    port, json_file, page = write(tmp_path, decay), tmp_path / "report.json", tmp_path / "page.html"
    assert exit_code(port, *FEW, "--dtype", "float64", "--json", json_file, "--report", page) == 1
    printed = capsys.readouterr()
    assert all("  ·  " in line for line in printed.err.splitlines())  # progress, each 30 s
    in_jax, in_torch = (line_with(port, code) for code in ("optax.adamw(", "AdamW(parameters"))
    says = f"weight decay 0.0001 at port.py:{in_jax}, the reference has 0.01 at port.py:{in_torch}  [decay_value]"
    assert says in printed.out
    assert printed.out.splitlines()[-1] == f"report: {page}"
    report = from_json(json_file.read_text())
    assert to_json(report) == json_file.read_text()
    assert (report.port, report.steps, report.world_size, report.verdict) == (str(port), 2, 1, "different")
    assert report.differences[0].cause is not None and report.differences[0].cause.names == ("decay_value",)
    assert not report.numerics  # --dtype float64
    assert str(report) in printed.out
    html = page.read_text()
    assert html.startswith("<!doctype html>") and "weight decay 0.0001, the reference has 0.01" in html


@pytest.mark.large
def test_the_memory_that_a_large_model_takes_is_printed_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(records, "LARGE_MODEL", 40)  # the port has 44 parameters; its processes know nothing of it
    assert exit_code(write(tmp_path), *FEW, "--dtype", "float64") == 0
    printed = capsys.readouterr()
    assert re.search(r"a model of 0 million parameters takes about 1 GiB, this machine has \d+ GiB", printed.err)
    assert "equal: " in printed.out


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_in_a_search_ends_it_and_the_report_is_printed(
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setattr(
        InterruptibleSearches, "on_rank", lambda self, *_: self.run(lambda: os.kill(os.getpid(), number))
    )
    before = signal.getsignal(signal.SIGTERM)
    ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests without one
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, ctrl_c))
    port = write(tmp_path, own_optimizers("SGD(parameters, lr=0.1)", "optax.sgd(0.2)"))
    json_file, page = tmp_path / "report.json", tmp_path / "page.html"
    assert exit_code(port, *FEW, "--dtype", "float64", "--json", json_file, "--report", page) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "different: The update differs, first at step 1" in printed and differences.ENDED in printed
    why = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert f"incomplete: Ended early by {why}, after " in printed and "s; not done: causes of differences." in printed
    report = from_json(json_file.read_text())
    assert (report.verdict, report.ended, report.untried) == ("different", why, (CAUSES,))
    assert re.search(
        f"<title>different, incomplete.*<b>Incomplete: </b>Ended early by {why}", page.read_text(), re.DOTALL
    )
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.large
def test_built_in_models_are_equal_and_give_exit_code_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file = tmp_path / "reports.json"
    assert exit_code("--only", "[lm]* sgd x1", *FEW, "--json", json_file) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["linear", "sgd"], ["mlp", "sgd"]]
    assert lines[-1].startswith("2 checks, all equal")
    reports = [from_json(json.dumps(report)) for report in json.loads(json_file.read_text())]
    assert [report.verdict for report in reports] == ["equal"] * 2
    assert all(len(report.stages["update"].residuals) == 2 for report in reports)


@pytest.mark.large
def test_names_are_written_into_the_port_and_checked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = write(tmp_path, *RENAMED, more="names = {}\n")
    assert exit_code(port, *FEW, "--dtype", "float64") == 2
    table = 'names = {\n    "inner": "fc1",\n}'
    assert f"perhaps, in the program (--write-names writes it there):\n{table}\n" in capsys.readouterr().out
    assert exit_code(port, *FEW, "--dtype", "float64", "--write-names") == 0
    assert f"names: written into {port}\n" in capsys.readouterr().out
    assert port.read_text().endswith(f"{table}\n")
    drops = ("torch.tanh(self.fc1(x))", "F.dropout(torch.tanh(self.fc1(x)))")  # a draw that jax has not
    port = write(tmp_path, *RENAMED, drops, more="names = {}\n")
    assert exit_code(port, *FEW, "--dtype", "float64", "--write-names") == 2
    printed = capsys.readouterr().out
    assert "not checked again" in printed and printed.count("torch draws a bernoulli") == 1
    assert port.read_text().endswith(f"{table}\n")


@pytest.mark.large
@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--platform", "jax: starting: --platform gpu: jax finds no GPU here; install jax[cuda12], or"),
        ("--torch-platform", "torch: torch rank 0, starting: --torch-platform gpu: torch finds no GPU here; use"),
    ],
)
def test_a_side_without_its_gpu_gives_exit_code_2(
    flag: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = ["--steps", "1", "--devices", "1", flag, "gpu", "--json", tmp_path / "found.json"]
    assert exit_code(write(tmp_path), *arguments) == 2
    assert capsys.readouterr().out.count(f"problem: {line}") == 1
    report = from_json((tmp_path / "found.json").read_text())
    assert (report.verdict, len(report.problems), report.losses) == ("incomplete", 1, ())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("none.py", "none.py: no such file"),
        ("FOLDER", ": must be a file, not a folder"),
        ("--devices 0", "--devices 0: must be at least 1"),
        ("--devices 65", "--devices 65: must be at most 64 (one process each)"),
        ("--steps -1", "--steps -1: must be at least 1"),
        ("--num-processes 0", "--num-processes 0: must be at least 1"),
        ("--num-processes 3", "--num-processes 3: must divide --devices 2"),
        ("--num-processes 2 --platform gpu", "--num-processes 2: is for CPU devices; --platform must not be gpu"),
        ("--steps ten", "--steps ten: expected INT"),
        ("--stall-timeout 0.5", "--stall-timeout 0.5: must be at least 1"),
        ("--stall-timeout nan", "--stall-timeout nan: must be at least 1"),
        ("--time-limit 0", "--time-limit 0.0: must be at least 1"),
        ("--dtype float16", "--dtype float16: unknown; did you mean float64? (one of both, float64)"),
        ("--platform cuda", "--platform cuda: unknown; did you mean "),
        ("--stepz 3", "--stepz: unknown flag; did you mean --steps?"),
        ("--port p.py", "--port: unknown flag; did you mean --report?"),  # it is given without a flag
        ("PORT --only mlp*", "--only mlp*: selects jaxddp's own models; must not be given with PROGRAM.py"),
        ("PORT PORT", "/port.py: unexpected argument; see --help"),
        ("PORT --stepz 3", "--stepz: unknown flag; did you mean --steps?"),
        ("PORT --accumulation-steps ten", "--accumulation-steps ten: expected INT"),
        ("PORT --amp bf16", "--amp bf16: has no effect in a check; leave it out"),
        ("--only mpl*", "--only mpl*: matches none of linear sgd x2, "),
        ("--report FOLDER/r.html", "/r.html: holds one check, not 36; select one with --only"),
        ("--report FOLDER/r.html --only convnet", "/r.html: holds one check, not 7; select one with --only"),
        ("PORT --json FOLDER/none/found.json", "/none/found.json: folder "),
        ("PORT --report FOLDER", ": is a folder; must be a new or a regular file"),
    ],
)
def test_bad_arguments_give_one_line_and_exit_code_2(
    argv: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = argv.replace("PORT", str(write(tmp_path))).replace("FOLDER", str(tmp_path)).split()
    assert exit_code(*words) == 2
    printed = capsys.readouterr()
    assert not printed.out
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ") and message in line


def test_a_crash_of_the_check_is_no_difference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jaxddp.parity.cases.builtin_cases", lambda *sizes: 1 / 0)
    assert exit_code() == 2
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.large
def test_the_command_shows_a_traceback_on_request(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jaxddp.parity", "--devices", "0", "--traceback"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    lines = ended.stderr.splitlines()
    assert lines[0].startswith("Traceback") and lines[-1] == "error: --devices 0: must be at least 1"


@pytest.mark.large
def test_a_script_that_children_would_run_again_is_told_so_in_a_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import jaxddp.parity\nprint(jaxddp.parity.check({str(write(tmp_path))!r}, steps=1))\n")
    ended = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    said = " ".join(ended.stdout.split())
    assert 'call the check under `if __name__ == "__main__":`' in said and "Traceback" not in ended.stderr


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--help") == 0
    printed = capsys.readouterr().out
    for flag in ("PROGRAM.py", "--devices", "--steps", "--dtype", "--only", "--json", "--report", "--platform"):
        assert flag in printed
    assert "0: equal, or different only beyond the run; 1: different; 2: could not be checked" in " ".join(
        printed.replace("│", " ").split()
    )


def test_built_in_cases_have_unique_names_and_cover_every_feature() -> None:
    names = [named.name for named in builtin_cases(2)]
    assert len(set(names)) == len(names)
    for feature in ("accumulation", "clipping", "global mean", "momentum", "nesterov", "one cycle"):
        assert any(feature in name for name in names)
    assert {named.case.world_size for named in builtin_cases(2)} == {1, 2, 4}


@pytest.mark.large
def test_a_limit_that_ends_the_imports_yields_text_page_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = Stop(10.0, clock=lambda: 20.0, began=0.0)
    with pytest.raises(Stopped):
        stop.poll()
    options = CheckOptions(write(tmp_path), json=tmp_path / "check.json", report=tmp_path / "check.html")
    assert _main(options, [], False, stop) == EXIT_CODES["incomplete"]
    assert "Ended early by the limit of 10 s" in capsys.readouterr().out
    assert json.loads((tmp_path / "check.json").read_text())["ended"] == "the limit of 10 s"
    assert "the limit of 10 s" in (tmp_path / "check.html").read_text()


def test_models_that_were_not_tried_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Progress, "untried", lambda self: setattr(self.stop, "why", "SIGTERM") or iter(()))
    json_file = tmp_path / "reports.json"
    assert exit_code("--only", "[lm]* sgd x1", *FEW, "--json", json_file) == 2
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("incomplete: Ended early by SIGTERM") and line.endswith("s; not done: mlp sgd x1.")
    (report,) = (from_json(json.dumps(report)) for report in json.loads(json_file.read_text()))
    assert (report.verdict, report.untried) == ("incomplete", ("mlp sgd x1",))


def test_an_error_of_a_port_is_printed_with_the_users_frames_and_with_traceback_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The errors arise in other processes, in code that a framework calls."""
    raises = 'def wrong(x):\n    raise ValueError("no such loss")\n\ndef '
    changes = [
        (f"def {side}_loss(model, batch):\n", f"def {side}_loss(model, batch):\n    wrong(batch)\n") for side in SIDES
    ]
    port = write(tmp_path, *changes, ("def batch(", f"{raises}batch("))
    line, calls = line_with(port, "raise ValueError"), [line_with(port, f"def {side}_loss") + 1 for side in SIDES]
    for flags in ([], ["--traceback"]):
        assert exit_code(port, *FEW, *flags) == 2
        printed = capsys.readouterr()
        assert printed.out.count("problem: ") == 2
        for call, side in zip(calls, SIDES, strict=True):
            assert f"port.py:{call}, {side}_loss: wrong(batch)\n" in printed.out
        assert printed.out.count(f'port.py:{line}, wrong: raise ValueError("no such loss")\n') == 2
        assert printed.err.count("Traceback (most recent call last)") == (4 if flags else 0)
        assert ("jaxddp/parity/torch_side/rank.py" in printed.err) == bool(flags)


def test_missing_names_are_listed_all_at_once_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port, page = tmp_path / "port.py", tmp_path / "page.html"
    port.write_text("def torch_model(): ...\ndef jax_batch(step, rank): ...\n")
    assert exit_code(port, *FEW, "--report", page) == 2
    printed = capsys.readouterr()
    (line,) = (line for line in printed.err.splitlines() if "  ·  " not in line)  # progress, each 30 s
    names = "jax_model, torch_loss, jax_loss, torch_batch, optimizer (or torch_optimizer and jax_optimizer)"
    assert line == f"error: {port}: has no {names}"
    assert printed.out == f"report: {page}\n" and "has no jax_model" in page.read_text()
