"""A program of a package, with options of every kind and workers, trained by both commands and resumed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.run_files import FILE

ROOT = Path(__file__).parents[2]
OPTIONS = """    width: int = 4
    act: Literal["tanh", "relu"] = "tanh"
    scales: list[float] = field(default_factory=lambda: [1.0])
    folder: Path = Path("data")
"""
READING = """
def augment(example, rng):
    from .scaling import scaled
    return scaled(example, SCALES)
"""
CHANGES = {
    "from dataclasses import dataclass\n": "from dataclasses import dataclass, field\nfrom pathlib import Path\n"
    "from typing import Literal\nfrom .scaling import SCALES\n",
    "    width: int = 4\n": OPTIONS,
    "def train_data():\n": "def train_data(options):\n    assert isinstance(options.folder, Path), options\n",
    "def torch_model(options):\n": "def torch_model(options):\n    assert type(options.scales) is list\n",
    "def jax_model(options, config):\n": "def jax_model(options, config):\n    assert type(options.scales) is list\n",
}
SCALING = """
SCALES = [2.0]

def scaled(example, scales):
    return {**example, "x": example["x"] * example["x"].dtype.type(scales[0])}
"""


def package(folder: Path) -> None:
    text = FILE
    for before, after in CHANGES.items():
        assert before in text, before
        text = text.replace(before, after)
    (folder / "shop" / "models").mkdir(parents=True)
    for name in ("shop/__init__.py", "shop/models/__init__.py"):
        (folder / name).touch()
    (folder / "shop" / "models" / "run.py").write_text(text + READING)
    (folder / "shop" / "models" / "scaling.py").write_text(SCALING)


def python(folder: Path, *words: str) -> str:
    command, env = [sys.executable, "-m", *words], {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.large
@pytest.mark.parametrize("trainer", ["jaxddp.train", "torch_ref.train"])
def test_a_module_of_a_package_is_trained_with_workers_and_resumed(trainer: str, tmp_path: Path) -> None:
    package(tmp_path)
    flags = ["--platform", "cpu", "--devices", "2", "--data-workers", "1", "--output", "a"]
    own = ["--act", "relu", "--scales", "1", "2", "--folder", "f"]
    python(tmp_path, trainer, "-m", "shop.models.run", *flags, *own, "--epochs", "1")
    config = (tmp_path / "a" / "config.json").read_text()
    assert '"folder": "f"' in config and '"scales": [' in config
    kept = {path.name for path in (tmp_path / "a" / "program").rglob("*.py")}
    assert {"run.py", "scaling.py"} <= kept
    printed = python(tmp_path, trainer, "shop/models/run.py", "--resume", "a", "--epochs", "2")
    assert "epoch 2/2" in printed and "instead of" not in printed and "changed" not in printed
