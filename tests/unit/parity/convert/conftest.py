"""A folder in which weights are converted."""

from pathlib import Path

import pytest
import safetensors.torch

from tests.support.convert_ports import weights, write_port


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change into a folder with a port and its torch model's weights."""
    monkeypatch.chdir(tmp_path)
    port = write_port()
    safetensors.torch.save_file(weights(port), "torch.safetensors")
    return tmp_path
