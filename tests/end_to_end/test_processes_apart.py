"""Processes whose files differ, as on machines that share no file system: refused, never trained on by mistake."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxddp.distributed.ports import free_port
from tests.support.train_runs import train

NAMES = ("--model", "char_mlp", "--dataset", "names", "--data-path", "names.txt")
LINEAR = ("--dataset", "linear", "--num-examples", "96", "--model", "mlp")


def write_names(folder: Path, endings: str) -> None:
    folder.mkdir()
    (folder / "names.txt").write_text("".join(f"{name}{other}\n" for name in "abcdefghij" for other in endings))


def apart(folder: Path, *flags: str) -> tuple[list[int], list[str]]:
    """Run two processes, each in a folder of its own; return their exit codes and errors. Neither prints more."""
    address = f"127.0.0.1:{free_port()}"
    shared = ("--platform", "cpu", "--num-processes", "2", "--devices", "2", "--coordinator", address)
    started = []
    for rank in "01":
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([f"{Path.cwd()}", f"{folder / rank}"])}
        command = [sys.executable, "-m", "jaxddp.train", *shared, *flags, "--process-id", rank]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, cwd=folder / rank))
    said = [process.communicate(timeout=120) for process in started]
    assert [output for output, _ in said] == ["", ""]
    return [process.returncode for process in started], [error for _, error in said]


@pytest.mark.large
def test_a_failure_in_one_process_is_told_by_all(tmp_path: Path) -> None:
    """Keep the data where process 1 is not."""
    write_names(tmp_path / "0", "abc")
    (tmp_path / "1").mkdir()
    codes, said = apart(tmp_path, *NAMES)
    assert codes == [2, 2], said
    assert said[1].startswith("error: --data-path names.txt: ")
    assert said[0] == f"error: process 1 failed: {said[1].removeprefix('error: ')}"


@pytest.mark.large
@pytest.mark.parametrize("endings", ["abd", "abcd"], ids=["as many", "more"])
def test_processes_that_read_other_data_are_refused(endings: str, tmp_path: Path) -> None:
    write_names(tmp_path / "0", "abc")
    write_names(tmp_path / "1", endings)
    codes, said = apart(tmp_path, *NAMES)
    assert codes == [2, 2], said
    message = r"process 1 and process 0 have different (training|test) data; all must read the same "
    assert all(re.match(rf"error: (process . failed: )?{message}\(--dataset, --data-path\)\n$", x) for x in said), said


@pytest.mark.large
def test_a_run_folder_that_only_one_process_sees_is_refused_before_training(tmp_path: Path) -> None:
    """Refuse what no checkpoint could ever be read from: each would write its slices into a folder of its own."""
    for rank in "01":
        (tmp_path / rank / "run").mkdir(parents=True)
        (tmp_path / rank / "run" / ".lock").write_text(f"process 1 on host{rank}")  # of an earlier run
    codes, said = apart(tmp_path, *LINEAR, "--join-timeout", "20", "--output", "run")
    assert codes == [2, 2], said
    message = "--output run: process 1 does not see this folder of process 0; choose a shared one"
    assert said == [f"error: process 1 failed: {message}\n", f"error: {message}\n"]
    assert [path.name for path in (tmp_path / "0" / "run").iterdir()] == [".lock"]  # which the next run takes


def trained(folder: Path) -> None:
    """Train two epochs of three steps in one process, and create the folders of two others."""
    flags = ("--global-batch-size", "32", "--devices", "2", "--epochs", "2", "--checkpoint-every", "1epochs")
    train(*LINEAR, *flags, "--output", f"{folder / 'run'}")
    for rank in "01":
        (folder / rank).mkdir()


@pytest.mark.large
def test_a_checkpoint_that_only_one_process_can_read_is_not_set_aside(tmp_path: Path) -> None:
    trained(tmp_path)
    (tmp_path / "1" / "sitecustomize.py").write_text(READS_NO_RECORD_OF_6)
    codes, said = apart(tmp_path, "--resume", "../run", "--epochs", "3")
    assert codes == [2, 2], said
    message = (
        "process 1 and process 0 have different newest intact checkpoints; --resume ../run must be readable by all"
    )
    assert all(text.endswith(f"{message}\n") for text in said), said
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["3", "6"]


@pytest.mark.large
def test_a_run_of_which_only_one_process_sees_the_checkpoints_is_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "0" / "checkpoints")
    (tmp_path / "1" / "checkpoints").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to("/proc/self/cwd/checkpoints")  # on a disk of each machine
    codes, said = apart(tmp_path, "--resume", "../run", "--epochs", "3")
    assert codes == [2, 2], said
    message = "process 1 and process 0 have different newest checkpoints; --resume ../run must be readable by all"
    assert all(text.endswith(f"{message}\n") for text in said), said


READS_NO_RECORD_OF_6 = """
import errno, pathlib

def read_bytes(path, read_bytes=pathlib.Path.read_bytes):
    if path.parts[-3:] == ("6", "record", "record.json"):
        raise OSError(errno.ESTALE, "Stale file handle")
    return read_bytes(path)

pathlib.Path.read_bytes = read_bytes
"""
