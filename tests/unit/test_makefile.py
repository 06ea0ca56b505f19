"""The commands that the README opens with, as far as they can be tried without installing anything."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(
    ("target", "extras", "last"),
    [
        ("train", "", "bin/jaxddp train"),
        ("test", "test", "--ignore tests/equivalence/test_matrix.py"),
        ("lint", "dev", "mypy"),
        ("mutants", "test", "benchmarks.scoreboard --parts exam"),
        ("gpu", "test", "benchmarks.gpu"),
        ("docs", "docs", "mkdocs build --strict"),
    ],
)
def test_each_target_installs_what_it_needs(target: str, extras: str, last: str, gpu: bool, tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nexit {0 if gpu else 1}\n")
    smi.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of make test
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    command = ["make", "--dry-run", target]
    printed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    wanted = ",".join(filter(None, ["cuda12" * gpu, extras]))
    assert re.findall(r'pip install .*-e "(.*)"', printed) == [f".[{wanted}]" if wanted else "."]
    assert last in printed[printed.rindex("pip install") :]


FIRST, SECOND = "first starts|first ends", "second starts|second ends"


@pytest.mark.parametrize(
    ("codes", "printed"),
    [
        ((0, 0, 0), f"{FIRST}|{SECOND}"),
        ((0, 0, 1), "first ends|second ends"),
        ((0, 1, 0), f"first ends|{SECOND}"),
        ((1, 0, 0), f"second ends|{FIRST}"),
        ((1, 2, 4), f"{SECOND}|{FIRST}"),
    ],
    ids=["none fails", "the third", "the second", "the first", "all"],
)
def test_of_the_three_processes_of_tests_those_that_fail_are_printed_last(
    codes: tuple[int, int, int], printed: str, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *--ignore*) echo "third whole"; exit {codes[2]};; *end_to_end*) part=first; code={codes[0]};;'
        f" *) part=second; code={codes[1]};; esac\n"
        'echo "$part starts"; echo "$part ends"; exit $code\n'
    )
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "-o", ".venv/installed-test", "test", f"BIN={tmp_path}", "ARGS="]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip().replace("\n", "|") == f"third whole|{printed}"
    assert (result.returncode != 0) == any(codes)
