"""The benchmark of a large port: its port has the sizes and the fault asked for; memory is that of all processes."""

import subprocess
import sys

import pytest

from benchmarks import large_port
from benchmarks.large_port import FAULT, Options, memory, port
from jaxddp.errors import InputError


def test_the_port_has_the_sizes_and_the_fault() -> None:
    right, wrong = (port(Options(width=64, heads=2, blocks=1, length=8, fault=fault)) for fault in (False, True))
    assert "TOKENS, LENGTH = 50257, 8\nWIDTH, HEADS, BLOCKS = 64, 2, 1\n" in right
    assert right.replace(*FAULT) == wrong != right
    compile(wrong, "gpt.py", "exec")


def test_a_changed_example_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "gpt.py").write_text(large_port.GPT.read_text().replace("(8, 1)", "(4, 1)"))
    monkeypatch.setattr(large_port, "GPT", tmp_path / "gpt.py")
    with pytest.raises(InputError, match="has no"):
        port(Options())


def test_memory_is_that_of_a_process_and_all_below_it() -> None:
    hold = "import subprocess, sys; block = bytes(range(256)) * 200_000; print(flush=True); input()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}], start_new_session=True)"
    command = [sys.executable, "-c", outer]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 51_200_000 < memory(process.pid) < 150_000_000
        process.communicate(b"\n")
    assert memory(process.pid) == 0
