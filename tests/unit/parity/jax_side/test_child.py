"""Count GPUs without jax, and keep compiled programs where the next job needs them."""

from pathlib import Path

import pytest

from jaxddp.parity.cases import PortCase
from jaxddp.parity.jax_side.child import _gpus, _unedited
from jaxddp.parity.port import PortFile
from jaxddp.parity.port.draws import DrawnSource


@pytest.mark.parametrize(
    ("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("2,3", 2), ("0, 1,", 2), ("GPU-8932f937-d72c", 1)]
)
def test_only_visible_gpus_are_counted(visible: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _gpus() == count


def test_without_the_variable_the_drivers_gpus_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _gpus() == 0  # there is no driver
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-1)'\necho 'GPU 1: H200 (UUID: GPU-2)'\n")
    program.chmod(0o755)
    assert _gpus() == 2
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not reach the driver.'\nexit 9\n")
    assert _gpus() == 0


def test_a_patched_port_keeps_the_programs_of_the_port() -> None:
    cases = []
    for texts in ((), (("port.py", "other = 1"),)):
        file = PortFile("port.py", texts=texts)
        cases += [PortCase(file, 2), PortCase(DrawnSource(file, (), 0), 2)]
    plain, drawn, patched, patched_and_drawn = cases
    assert _unedited(patched) == _unedited(plain) == plain != patched
    assert _unedited(patched_and_drawn) == _unedited(drawn) == drawn != plain
