"""The commands write over nothing of a user's: refused before anything runs, in one line; what they wrote is known."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxddp.cli.flags import parse_plain
from jaxddp.errors import InputError
from jaxddp.parity.command import DIFF, CheckOptions, _write_names
from jaxddp.parity.convert.command import ConvertOptions, convert
from jaxddp.parity.patch.edited_files import unified
from jaxddp.parity.recordings.command import CompareOptions
from jaxddp.parity.report import json_form, page
from jaxddp.parity.report.json_schema import schema
from jaxddp.parity.report.report import Report
from jaxddp.plan.options import PlanOptions

PORT = "torch_model = jax_model = None\n"
REPORT = Report("port.py", 2, 10, "float64")


def check(*argv: str) -> None:
    parse_plain(CheckOptions, ["port.py", *argv], "prog")


def compare(*argv: str) -> None:
    parse_plain(CompareOptions, ["torch", "jax", *argv], "prog")


def plan(*argv: str) -> None:
    parse_plain(PlanOptions, argv, "prog", PlanOptions())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("port.py").write_text(PORT)
    os.mkfifo("fifo")
    Path("link").symlink_to("port.py")


@pytest.mark.parametrize(
    ("parse", "flags"),
    [
        (check, ("--json", "--report", "--patch")),
        (compare, ("--json", "--report")),
        (plan, ("--picture", "--program")),
    ],
)
def test_a_command_refuses_what_is_a_user_s_before_it_starts(parse: Callable[..., None], flags: Sequence[str]) -> None:
    for flag in flags:
        parse(flag, "new")
        for name, problem in (
            ("port.py", "exists, and does not begin as what this version's"),
            ("fifo", "is a pipe, a device or a socket"),
            ("link", "is a link"),
            (os.devnull, "is a pipe, a device or a socket"),
            (".", "is a folder"),
        ):
            with pytest.raises(InputError, match=rf"^{flag} {re.escape(name)}: {problem}"):
                parse(flag, name)
    with pytest.raises(InputError, match=rf"^{flags[1]} new: is the file of {flags[0]} new; choose another name$"):
        parse(flags[0], "new", flags[1], "./new")
    assert Path("port.py").read_text() == PORT and sorted(map(str, Path().iterdir())) == ["fifo", "link", "port.py"]


@pytest.mark.parametrize(
    ("flag", "content"),
    [
        ("--json", json_form.to_json(REPORT)),
        ("--json", f"[{json_form.to_json(REPORT).strip()}]\n"),  # of jaxddp's own models
        ("--report", page.to_html(REPORT)),
        ("--report", page.to_html(REPORT, "style.css")),
        ("--patch", DIFF.decode() + unified("port.py", "a\n", "b\n")),
    ],
)
def test_what_a_flag_wrote_is_replaced_by_it_and_by_no_other(flag: str, content: str) -> None:
    Path("written").write_text(content)
    check(flag, "written")
    for other in {"--json", "--report", "--patch"} - {flag}:
        with pytest.raises(InputError, match="exists, and does not begin as"):
            check(other, "written")


def test_the_mark_of_a_json_report_is_in_its_schema() -> None:
    beginning = '{\n "format": ' + json.dumps(schema()["properties"]["format"]["const"])
    assert re.match(json_form.MARK, beginning.encode()) and json_form.to_json(REPORT).startswith(beginning)


@pytest.mark.parametrize("tool", [["git", "apply", "fixes.diff"], ["patch", "-p1", "-i", "fixes.diff"]])
def test_a_diff_with_its_mark_can_be_applied(tool: list[str]) -> None:
    if shutil.which(tool[0]) is None:
        pytest.skip(f"{tool[0]} is not installed")
    Path("fixes.diff").write_bytes(DIFF + unified("port.py", PORT, "fixed = True\n").encode())
    subprocess.run(tool, check=True, capture_output=True)
    assert Path("port.py").read_text() == "fixed = True\n"


def test_names_are_written_into_the_target_of_a_linked_port() -> None:
    Path("port.py").chmod(0o700)
    _write_names(Path("link"), Report("link", 2, 10, "float64", names={"fc.kernel": "fc.weight"}))
    assert Path("link").is_symlink() and "names = {" in Path("port.py").read_text()
    assert Path("port.py").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("force", [False, True])
def test_convert_never_writes_over_what_it_reads(force: bool) -> None:
    Path("w.safetensors").write_text("weights")
    Path("other").write_text("other")
    options: Any = {"port": Path("port.py"), "weights": Path("w.safetensors"), "force": force}
    for out, problem in (
        ("port.py", "OUT port.py: is the file of PROGRAM.py port.py"),
        ("link", "OUT link: is a link"),
        ("fifo", "OUT fifo: is a pipe"),
    ):
        with pytest.raises(InputError, match=f"^{problem}"):
            convert(ConvertOptions(out=Path(out), **options))
    with pytest.raises(InputError, match="^other: exists; --force replaces it$" if not force else "port.py"):
        convert(ConvertOptions(out=Path("other"), **options))
    assert Path("other").read_text() == "other" and Path("w.safetensors").read_text() == "weights"
