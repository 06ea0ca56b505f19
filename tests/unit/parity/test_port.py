"""Programs: loading them, and the one-line errors for bad ones."""

import re
import sys
from collections import UserDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
import torch

from jaxddp import scripts
from jaxddp.config import TrainConfig
from jaxddp.errors import InputError
from jaxddp.parity.port import Port, errors_located, load_port
from jaxddp.parity.torch_side.side import to_batch
from jaxddp.scripts import run_file

FILE = """
import numpy as np
from beside import SIZE

def torch_model(): return "a torch module"
def jax_model(): return "a jax module"
def torch_loss(model, batch): return 1.0
def jax_loss(model, batch): return 1.0
def batch(step, rank): return {"x": np.full(SIZE, step), "y": np.full(SIZE, rank)}
optimizer = "adam"
accumulation_steps = 2
"""


def write(folder: Path, text: str) -> Path:
    (folder / "beside.py").write_text("SIZE = 4\n")
    (folder / "mine.py").write_text(text)
    return folder / "mine.py"


def port(**changes: Any) -> Port:
    fields: dict[str, Any] = dict.fromkeys(["torch_model", "jax_model", "torch_loss", "jax_loss"], lambda *_: None)
    fields |= {"batch": lambda step, rank: {"x": np.arange(6)}, "optimizer": "sgd"}
    return Port(**fields | changes)


def test_load_port_reads_the_fields_from_the_file(tmp_path: Path) -> None:
    loaded = load_port(write(tmp_path, FILE))
    assert (loaded.torch_model(), loaded.jax_model()) == ("a torch module", "a jax module")
    assert (loaded.optimizer.optimizer, loaded.accumulation_steps) == ("adam", 2)
    first, second = loaded.micro_batches(step=3, rank=1)
    assert {name: array.tolist() for name, array in first.items()} == {"x": [3, 3], "y": [1, 1]}
    assert first.keys() == second.keys()


@pytest.mark.parametrize(
    ("intended", "message"),
    [
        ({"initialization": "x"}, "intended initialization: unknown; did you mean initialisation?"),
        ({"types": "x"}, "intended types: unknown"),
        ({"initialisation": ""}, "intended: initialisation: must have a reason"),
        (["initialisation"], "intended: must be a dictionary, and is list"),
    ],
)
def test_what_a_port_means_to_differ_in_is_named_with_its_reason(intended: Any, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        port(intended=intended)
    assert port(intended={"gradients": "as in the paper"}).facts.intended == (("gradients", "as in the paper"),)


def test_a_port_file_gives_the_length_of_the_training(tmp_path: Path) -> None:
    assert load_port(write(tmp_path, f"{FILE}\ntotal_steps = 40\n")).total_steps == 40
    with pytest.raises(InputError, match="total_steps '40': must be a positive number of optimizer steps"):
        load_port(write(tmp_path, f"{FILE}\ntotal_steps = '40'\n"))


RUN = (
    FILE.partition("def batch")[0]
    + """
from dataclasses import dataclass
@dataclass
class Options:
    width: int = 4
lr, freeze, ema_decay = 0.1, ("0.*",), 0.99
def train_data(options): return {"x": np.ones((20, options.width))}
"""
)


def test_flags_override_a_run_files_values(tmp_path: Path) -> None:
    path = write(tmp_path, RUN)
    loaded = load_port(path, 2, ["--lr=0.3", "--width", "5", "--clip-grad-norm", "1", "--global-batch-size", "4"])
    assert (loaded.optimizer.lr, loaded.clip_grad_norm) == (0.3, 1.0)
    assert loaded.first_batch("jax")["x"].shape == (2, 5)
    assert load_port(path).optimizer.lr == 0.1


def test_flags_that_the_check_leaves_out_are_noted_or_refused(tmp_path: Path) -> None:
    path = write(tmp_path, RUN)
    assert load_port(path).facts.unchecked == ("--freeze 0.*", "--ema-decay 0.99")
    with pytest.raises(InputError, match=r"^--amp bf16: has no effect in a check; leave it out$"):
        load_port(path, flags=["--amp", "bf16"])


def test_the_schedule_of_a_run_file_spans_the_run(tmp_path: Path) -> None:
    """A check of fewer steps than the run's warm-up sees its first part."""
    flags = "epochs, global_batch_size, optimizer, lr, lr_scaling = 3, 4, 'sgd', 0.1, 'linear'"
    data = "def train_data():\n    import numpy as np\n    return {'x': np.ones(20)}"
    file = FILE.partition("def batch")[0] + f"{flags}\n{data}\n"
    loaded = load_port(write(tmp_path, file), world_size=2)
    assert (loaded.steps_per_epoch, loaded.total_steps, loaded.optimizer.lr) == (5, 15, 0.2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("def torch_model", "def model"), "has no torch_model"),
        (("def jax_loss", "def torch_batch"), "has no jax_loss"),
        (
            ("def ", "def _"),
            "has no torch_model, jax_model, torch_loss, jax_loss, batch (or torch_batch and jax_batch)",
        ),
        (('optimizer = "adam"', 'optimizer = "adm"'), "optimizer adm: unknown; did you mean adam?"),
        (
            ('optimizer = "adam"', ""),
            "has no optimizer (or torch_optimizer and jax_optimizer)",
        ),
        (("def jax_loss(model, batch): return 1.0", "jax_loss = 1.0"), "jax_loss: must be a function, and is float"),
        (("import SIZE", "import WIDTH"), "line 3: ImportError: cannot import name 'WIDTH'"),
        (("optimizer =", "optimizer ==="), "line 10: SyntaxError: invalid syntax"),
        (("accumulation_steps = 2", "accumulation_steps = 0"), "accumulation_steps 0: must be at least 1"),
        (
            ("accumulation_steps = 2", "acumulation_steps = 2"),
            "acumulation_steps: not a name of a program; did you mean accumulation_steps?",
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


def test_each_port_gets_the_modules_beside_it(tmp_path: Path) -> None:
    """Two folders with modules and packages of the same names, as in a folder of ports; a caller's module stays."""
    sizes = {"one": 4, "other": 6}
    for name, size in sizes.items():
        package = tmp_path / name / "package"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("from package.inner import SIZE\n")
        (package / "inner.py").write_text(f"SIZE = {size}\n")
        (tmp_path / name / "neighbour.py").write_text("from package import SIZE\n")
        write(tmp_path / name, FILE.replace("from beside import", "from neighbour import"))
    for name in ("one", "other", "one"):
        assert load_port(tmp_path / name / "mine.py").first_batch("torch")["x"].shape == (sizes[name] // 2,)
    mine = sys.modules["neighbour"]
    load_port(tmp_path / "one" / "mine.py")
    assert sys.modules["neighbour"] is mine  # not run twice: it may register something
    assert sys.modules[__name__].write is write


def test_a_missing_file_is_reported_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.py: no such file$"):
        load_port(tmp_path / "none.py")
    (tmp_path / "port.txt").write_text(FILE)
    with pytest.raises(InputError, match=r"port\.txt: must be a Python file, \*\.py$"):
        load_port(tmp_path / "port.txt")


OWN = {"optimizer": None, "torch_optimizer": list}
CONFIGURED = {"configure_optimizers": list, "jax_optimizer": optax.sgd(1)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch_optimizer": list}, "optimizer: give either"),
        (OWN, "optimizer: give either"),
        ({"torch_scheduler": list}, "torch_scheduler: needs torch_optimizer"),
        ({"clip_grad_norm": 0}, "clip_grad_norm 0: must be above 0"),
        ({"names": ["fc"]}, "names: must be a dictionary, and is list"),
        (
            {"names": {"fc": None}},
            "names: 'fc': must be a name in torch, or fused, part, summed, transposed, flattened; is None",
        ),
        (
            OWN | {"jax_optimizer": "adam"},
            "jax_optimizer: must be an optax transformation or an nnx.Optimizer, and is",
        ),
        (
            OWN | {"jax_optimizer": optax.adam},
            r"jax_optimizer: is the function optax.adam; must be called, as in opta",
        ),
        ({"configure_optimizers": list}, "optimizer: give either"),
        (OWN | CONFIGURED, "configure_optimizers: must not be given with torch_optimizer"),
        ({"optimizer": None, **CONFIGURED, "torch_scheduler": list}, "torch_scheduler: needs torch_optimizer"),
    ],
)
def test_contradictory_fields_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        port(**changes)
    port(optimizer=TrainConfig(optimizer="sgd", lr=0.1))
    port(**OWN, jax_optimizer=optax.sgd(0.1), torch_scheduler=list)
    port(optimizer=None, configure_optimizers=list, jax_optimizer=lambda model: optax.sgd(0.1))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([0.0, 0.0], "must be a dictionary or tuple of arrays, and is list"),
        ({}, "must be a dictionary or tuple of arrays, and is dict"),
        ({"x": np.zeros(2), "y": np.zeros(3)}, r"its arrays must have the same length, at least 1, and have \{'x': 2"),
        ({"x": 1.0}, "x: must be an array with an entry for each example, and is one number$"),
        ({"x": np.zeros(2), "n": 3}, "n: must be an array with an entry for each example, and is one number$"),
        ({"text": ["a", "b"], "m": None}, "must hold numbers, and has text of <U1, m of None"),
        ({"x": {"ids": [[1, 2], [3]]}}, "x > ids: must be an array, and is a list of .* lengths; pad them"),
    ],
)
def test_bad_batches_are_refused(batch: Any, message: str) -> None:
    with pytest.raises(InputError, match=rf"^batch\(0, 1\): {message}"):
        port(batch=lambda step, rank: batch, accumulation_steps=2).micro_batches(0, 1)


def test_accumulation_steps_must_divide_the_examples() -> None:
    with pytest.raises(InputError, match=r"^accumulation_steps 2: must divide the 3 examples of batch\(0, 1\)"):
        port(batch=lambda step, rank: {"x": np.zeros(3)}, accumulation_steps=2).micro_batches(0, 1)


BESIDE = """
SIZE = 4

def inner():
    raise KeyError("gone")

def outer():
    try:
        inner()
    except KeyError as error:
        raise ValueError("no such thing") from error
"""


@pytest.mark.parametrize(
    ("call", "line", "message"),
    [("inner()", 5, "KeyError: 'gone'"), ("outer()", 11, "ValueError: no such thing")],
)
def test_an_error_in_a_module_beside_the_port_is_told_with_its_own_line(
    call: str, line: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("parts", "parts.helpers"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "helpers.py").write_text(BESIDE)
    path = write(tmp_path, f"{FILE}\ndef torch_model():\n    from parts import helpers\n    return helpers.{call}\n")
    loaded = load_port(path)
    with pytest.raises(InputError) as caught, errors_located(path):
        loaded.torch_model()
    assert str(caught.value) == f"{tmp_path / 'parts' / 'helpers.py'}: line {line}: {message}"


def test_a_syntax_error_in_a_module_beside_the_port_is_told_with_its_own_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("SIZE = 4\nx = = 3\n")
    with pytest.raises(InputError, match=r"broken\.py: line 2: SyntaxError: invalid syntax"):
        load_port(write(tmp_path, f"import broken\n{FILE}"))


def test_a_module_of_the_path_is_imported_once_for_all_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only modules beside a port give way to another port's; an installed one of the same name stays as it is."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "library_of_ports.py").write_text("SIZE = 4\n")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    file = FILE.replace("from beside import", "from library_of_ports import")
    load_port(write(tmp_path, file))
    kept = sys.modules["library_of_ports"]
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "library_of_ports.py").write_text("SIZE = 6\n")
    load_port(write(tmp_path / "second", file))
    assert sys.modules.pop("library_of_ports") is kept


def test_an_error_that_a_library_turns_into_another_is_told_with_the_users_line(tmp_path: Path) -> None:
    """The second error is raised where no line of the user's is; its context has one."""
    path = write(tmp_path, f"{FILE}\ndef jax_model(): return 1 / 0\n")
    loaded = load_port(path)

    library = tmp_path / "site-packages" / "library.py"
    library.parent.mkdir()
    library.write_text(
        "def build(make):\n"
        "    try: make()\n"
        "    except ZeroDivisionError as error: raise RuntimeError('cannot build') from error\n"
    )
    build = run_file(library).build
    with pytest.raises(InputError, match=r"mine\.py: line 13: RuntimeError: cannot build$"), errors_located(path):
        build(loaded.jax_model)


def test_lines_of_installed_packages_in_the_ports_folder_are_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / ".venv" / "lib" / "site-packages"
    package.mkdir(parents=True)
    (package / "deep.py").write_text("def fails():\n    raise KeyError('gone')\n")
    monkeypatch.syspath_prepend(package)
    loaded = load_port(path := write(tmp_path, f"import deep\n{FILE}\ndef jax_model(): return deep.fails()\n"))
    with pytest.raises(InputError, match=r"mine\.py: line 14: KeyError: 'gone'$"), errors_located(path):
        loaded.jax_model()


def test_batches_come_back_as_the_port_has_them() -> None:
    """A `UserDict` with tensors is what tokenizers of Hugging Face return, as `BatchEncoding`."""
    tokens = torch.arange(8).reshape(4, 2)
    weights = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    batch = {
        "encoding": UserDict({"input_ids": tokens, "token_type_ids": None}),
        "text": ["a", "b", "c", "d"],
        "weights": weights,
        "labels": [0, 1, 2, 3],
        "image": np.full((4, 2, 2), 200, np.uint8),
    }
    seen: list[Any] = []
    of_port = port(
        batch=lambda step, rank: batch, accumulation_steps=2, torch_loss=lambda model, batch: seen.append(batch)
    )
    for arrays in of_port.micro_batches(0, 0):
        assert all(isinstance(x, np.ndarray) and len(x) == 2 for x in arrays.values())
        of_port.torch_loss(None, to_batch(arrays, "float32"))
    first, second = seen
    assert first.keys() == {"encoding", "weights", "labels", "image"}
    assert second["encoding"]["input_ids"].tolist() == [[4, 5], [6, 7]] and second["encoding"]["token_type_ids"] is None
    assert (second["weights"].dtype, second["labels"].dtype) == (torch.float32, torch.int64)
    assert (second["image"] * 2)[0, 0, 0] == 400 % 256  # uint8, as a loader's images are


def test_a_loss_of_a_port_is_given_its_own_kind_of_batch_once() -> None:
    seen: list[Any] = []
    of_port = port(jax_loss=lambda model, batch: seen.append(batch))
    replace(of_port, jax_loss=of_port.jax_loss).jax_loss(None, {"a > b": 1, "c is None": 0, "d.e": 2})
    assert seen == [{"a": {"b": 1}, "c": None, "d.e": 2}]


def test_a_file_that_takes_long_tells_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scripts, "PATIENCE", 0.1)
    path = tmp_path / "slow.py"
    path.write_text("import time\ntime.sleep(0.35)\n")
    scripts.run_file(path)
    told = capsys.readouterr().err.splitlines()
    assert told and all(re.fullmatch(rf"{path}: has run for \d+ s, and is still at line 2", line) for line in told)
