"""Memory is that of a process and of all below it."""

import subprocess
import sys

from benchmarks.processes import memory
from jaxddp.parity.family import family


def test_memory_is_that_of_a_process_and_all_below_it() -> None:
    hold = "import subprocess, sys; block = bytes(range(256)) * 200_000; print(flush=True); input()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}], start_new_session=True)"
    command = [sys.executable, "-c", outer]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 51_200_000 < memory(family(process.pid)) < 150_000_000
        process.communicate(b"\n")
    assert memory(family(process.pid)) == 0
