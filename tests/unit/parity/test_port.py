"""Port files: loading them, and the one-line errors for bad ones."""

from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

from jaxddp.config import TrainConfig
from jaxddp.errors import InputError
from jaxddp.parity.port import Port, load_port

FILE = """
import numpy as np
from beside import SIZE

def torch_model(): return "a torch module"
def flax_model(): return "a flax module"
def torch_loss(model, batch): return 1.0
def flax_loss(model, batch): return 1.0
def batch(step, rank): return {"x": np.full(SIZE, step), "y": np.full(SIZE, rank)}
optimizer = "adam"
accumulation_steps = 2
"""


def write(folder: Path, text: str) -> Path:
    (folder / "beside.py").write_text("SIZE = 4\n")
    (folder / "mine.py").write_text(text)
    return folder / "mine.py"


def port(**changes: Any) -> Port:
    fields: dict[str, Any] = dict.fromkeys(["torch_model", "flax_model", "torch_loss", "flax_loss"], lambda *_: None)
    fields |= {"batch": lambda step, rank: {"x": np.arange(6)}, "optimizer": "sgd"}
    return Port(**fields | changes)


def test_load_port_reads_the_fields_from_the_file(tmp_path: Path) -> None:
    loaded = load_port(write(tmp_path, FILE))
    assert (loaded.torch_model(), loaded.flax_model()) == ("a torch module", "a flax module")
    assert (loaded.optimizer, loaded.accumulation_steps) == ("adam", 2)
    first, second = loaded.micro_batches(step=3, rank=1)
    assert {name: array.tolist() for name, array in first.items()} == {"x": [3, 3], "y": [1, 1]}
    assert first.keys() == second.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("def torch_model", "def model"), "has no torch_model"),
        (('optimizer = "adam"', 'optimizer = "adm"'), "optimizer adm: unknown; did you mean adam?"),
        (
            ('optimizer = "adam"', ""),
            "optimizer: give either one for both sides, or torch_optimizer and flax_optimizer",
        ),
        (("def flax_loss(model, batch): return 1.0", "flax_loss = 1.0"), "flax_loss: must be a function, and is float"),
        (("import SIZE", "import WIDTH"), "line 3: ImportError: cannot import name 'WIDTH'"),
        (("optimizer =", "optimizer ==="), "line 10: SyntaxError: invalid syntax"),
        (("accumulation_steps = 2", "accumulation_steps = 0"), "accumulation_steps 0: must be at least 1"),
        (
            ("accumulation_steps = 2", "acumulation_steps = 2"),
            "acumulation_steps: not a field of a port; did you mean accumulation_steps?",
        ),
        (("accumulation_steps = 2", "1 / 0"), "line 11: ZeroDivisionError: division by zero"),
    ],
)
def test_a_bad_file_is_reported_in_one_line(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    assert change[0] in FILE
    path = write(tmp_path, FILE.replace(*change))
    with pytest.raises(InputError) as caught:
        load_port(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_reported_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.py: no such file$"):
        load_port(tmp_path / "none.py")
    (tmp_path / "port.txt").write_text(FILE)
    with pytest.raises(InputError, match=r"port\.txt: must be a Python file, \*\.py$"):
        load_port(tmp_path / "port.txt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch_optimizer": list}, "optimizer: give either"),
        ({"optimizer": None, "torch_optimizer": list}, "optimizer: give either"),
        ({"torch_scheduler": list}, "torch_scheduler: needs torch_optimizer"),
        ({"clip_grad_norm": 0}, "clip_grad_norm 0: must be above 0"),
        (
            {"optimizer": None, "torch_optimizer": list, "flax_optimizer": "adam"},
            "flax_optimizer: must be an optax transformation, and is str",
        ),
    ],
)
def test_contradictory_fields_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        port(**changes)
    port(optimizer=TrainConfig(optimizer="sgd", lr=0.1))
    port(optimizer=None, torch_optimizer=list, flax_optimizer=optax.sgd(0.1), torch_scheduler=list)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([np.zeros(2)], r"batch\(0, 1\): must be a dictionary of arrays, and is list"),
        ({}, r"batch\(0, 1\): must be a dictionary of arrays, and is dict"),
        (
            {"x": np.zeros(2), "y": np.zeros(3)},
            r"batch\(0, 1\): its arrays must have the same length, at least 1, and have \{'x': 2",
        ),
        ({"x": 1.0}, r"batch\(0, 1\): its arrays must have the same length"),
        ({"x": np.zeros(3)}, r"accumulation_steps 2: must divide the 3 examples of batch\(0, 1\)"),
    ],
)
def test_bad_batches_are_refused(batch: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        port(batch=lambda step, rank: batch, accumulation_steps=2).micro_batches(0, 1)
