"""The commands themselves, given absurd flags, files and surroundings: one line, exit code 2, and no folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 120  # for one run; measured: 3, and 20 beside other work

ABSURD = {
    "no examples": "--dataset linear --num-examples 0",
    "all examples of the world": "--dataset linear --num-examples 2147483647",
    "features": "--dataset linear --num-features 1000000000",
    "classes": "--dataset linear --num-classes 2000000000",
    "wide": "--hidden-sizes 1000000000",
    "wider": "--hidden-sizes 2147483647 2147483647",
    "too wide": "--hidden-sizes 99999999999999999999",
    "convolutions": "--model convnet --hidden-sizes 100000000",
    "embedding": "--dataset names --model char_mlp --embedding-size 2147483647",
    "context": "--dataset names --model char_mlp --context-length 2147483647",
    "batch": "--global-batch-size 2147483646 --drop-last-batch",
    "accumulation": "--accumulation-steps 2147483647",
    "devices": "--devices 1000000000",
    "some devices": "--devices 512 --global-batch-size 512",
    "steps": "--epochs 2147483647",
    "more steps": "--epochs 2147483648",
    "digits": f"--epochs {'9' * 400}",
    "many digits": f"--seed {'9' * 5000}",
    "rank": "--comm-hook batched_powerSGD --matrix-approximation-rank 2147483647",
    "rate": "--lr 1e400",
    "no number": "--lr nan",
    "letters": "--epochs ten",
    "none": "--epochs None",
    "twice": "--output a --output b",
    "unknown": "--lerning-rate 1",
    "empty": "--model=",
    "zero device": "--weights /dev/zero",
    "null device": "--dataset npz --data-path /dev/null",
    "folder as weights": "--weights /",
    "folder as data": "--dataset npz --data-path /",
    "process as weights": "--weights /proc/self/environ",
    "output in a file": "--output /dev/null/run",
    "output in /proc": "--output /proc/run",
    "resume of nothing": "--resume /nowhere",
    "resume of a device": "--resume /dev/null",
    "pattern": "--freeze [",
    "all frozen": "--freeze *",
}


def run(package: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"{package}.train", "--platform", "cpu", *flags]
    return subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.large
@pytest.mark.parametrize("package", ["jaxddp", "torch_ref"])
@pytest.mark.parametrize("what", ABSURD)
def test_absurd_flags_end_with_one_line_and_no_folder(what: str, package: str, tmp_path: Path) -> None:
    flags = ABSURD[what].split()
    output = [] if {"--output", "--resume"} & set(flags) else ["--output", str(tmp_path / "run")]
    result = run(package, *flags, *output)
    assert (result.returncode, result.stdout) == (2, ""), result.stderr[-500:]
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr[-500:]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.large
def test_a_resumed_run_prints_no_warnings(tmp_path: Path) -> None:
    flags = ["--hidden-sizes", "16", "--global-batch-size", "128", "--epochs"]
    assert run("jaxddp", *flags, "1", "--output", str(tmp_path / "run")).stderr == ""
    result = run("jaxddp", "--epochs", "2", "--devices", "4", "--resume", str(tmp_path / "run"))
    assert (result.returncode, result.stderr) == (0, "")
