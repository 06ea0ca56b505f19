"""Check that the port of the large benchmark has the sizes and the fault asked for."""

import pytest

from benchmarks import large_port
from benchmarks.large_port import FAULT, port
from jaxddp.errors import InputError


def test_the_port_has_the_sizes_and_the_fault() -> None:
    right, wrong = port(fault=False), port(fault=True)
    assert "    layers: int = 12\n    heads: int = 12\n    width: int = 768\n" in right
    assert right.replace(*FAULT) == wrong != right
    compile(wrong, "gpt2.py", "exec")


def test_a_changed_example_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "gpt2.py").write_text(large_port.GPT.read_text().replace("vocab: int = 256", "vocab: int = 128"))
    monkeypatch.setattr(large_port, "GPT", tmp_path / "gpt2.py")
    with pytest.raises(InputError, match="has no"):
        port(fault=False)
