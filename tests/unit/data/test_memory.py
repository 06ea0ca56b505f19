"""Limits of memory are compared with what a run needs, and named."""

import resource
import subprocess
import sys

import pytest

from jaxddp import cli
from jaxddp.config.ulimits import check_address_space
from jaxddp.data.memory import check_memory
from jaxddp.errors import InputError


def test_a_limit_of_the_shell_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    limits = {resource.RLIMIT_AS: 2**30, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], resource.RLIM_INFINITY))
    check_memory("the numbers", 2**30)
    check_address_space(2**30)
    with pytest.raises(InputError, match=r"^the numbers take 2 GiB, and `ulimit -v` allows 1 GiB$"):
        check_memory("the numbers", 2**31)
    with pytest.raises(InputError, match=r"^ulimit -v 1048576: must be at least 2097152 \(kB\), or unlimited$"):
        check_address_space(2**31)
    for error in (MemoryError("std::bad_alloc"), RuntimeError("can't start new thread")):
        with pytest.raises(SystemExit, match="2"), cli.one_line_errors(show_traceback=False):
            raise error
        assert capsys.readouterr().err.endswith(f"memory: {error}; choose smaller sizes; ulimit -v is 1048576\n")


@pytest.mark.parametrize("package", ["jaxddp", "torch_ref"])
def test_a_limit_that_is_too_low_is_told_before_libraries_are_loaded(package: str) -> None:
    command = ["bash", "-c", f"ulimit -v 500000; exec {sys.executable} -m {package}.train"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ulimit -v 500000: must be at least ") and done.stderr.count("\n") == 1
