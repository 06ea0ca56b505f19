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
        ("train", "", "jaxddp.train"),
        ("test", "test", "tests/equivalence/test_matrix.py tests/end_to_end"),
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


@pytest.mark.parametrize(
    ("codes", "printed"),
    [
        ((0, 0), "second whole|first starts|first ends"),
        ((0, 1), "second whole|first ends"),
        ((1, 0), "second whole|first starts|first ends"),
        ((1, 2), "second whole|first starts|first ends"),
    ],
    ids=["none fails", "the second", "the first", "both"],
)
def test_of_the_two_processes_of_tests_the_one_that_fails_is_printed_last(
    codes: tuple[int, int], printed: str, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *--ignore*) echo "second whole"; exit {codes[1]};; esac\n'
        f'echo "first starts"; echo "first ends"; exit {codes[0]}\n'
    )
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "-o", ".venv/installed-test", "test", f"BIN={tmp_path}", "ARGS="]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip().replace("\n", "|") == printed
    assert (result.returncode != 0) == any(codes)
