"""Names of a program that would be ignored without a word, and files that run themselves or lie in packages."""

from pathlib import Path

import numpy as np
import pytest

from jaxddp import cli
from jaxddp.config import TrainerConfig
from jaxddp.data.sources import as_source
from jaxddp.data.sources.source import Job
from jaxddp.data.sources.workers import DataWorkers
from jaxddp.errors import InputError
from jaxddp.program import check_flags, default_config, load_program
from jaxddp.scripts import run_file
from torch_ref.config import TorchTrainerConfig

DATA = "def train_data(): return {'x': [1.0]}\n"
OPTIMIZER = "def jax_optimizer(config): return sgd(config.lr, config.weight_decay)\n"


def write(folder: Path, text: str, name: str = "run.py") -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("def val_data(): return 1", "test_data"),
        ("from colorsys import rgb_to_hsv as eval_data", "test_data"),
        ("class Adam: pass\njax_optimiser = Adam()", "jax_optimizer"),
        ("import optax\njax_optimiser = optax.adam(1e-3)", "jax_optimizer"),
        ("def loss_fn(model, batch): return 1", "jax_loss or torch_loss"),
        ("batch_size = 8", "global_batch_size"),
        ("EPOCHS = 3", "epochs"),
        ("epoch = 3", "epochs"),
        ("learning_rate = 3", "lr"),
        ("on_epoch_ends = print", "on_epoch_end"),
        ("if DATA:\n    num_epochs = 3", "epochs"),
    ],
)
def test_an_unused_name_close_to_a_known_one_is_refused(line: str, meant: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"DATA = 1\n{line}\n{DATA}")
    with pytest.raises(InputError, match=rf"^{path}: \w+: not a name of a program; did you mean {meant}\?$"):
        load_program(path)


@pytest.mark.parametrize("name", ["model", "loss", "step", "optimizer", "batch", "start", "restore", "metrics"])
def test_a_former_name_is_refused_with_the_present_one(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"def flax_{name}(): return 1\n{DATA}")
    with pytest.raises(InputError, match=rf"^{path}: flax_{name}: must be called jax_{name}, as"):
        load_program(path)


def test_a_helper_with_a_former_name_stays_beside_the_present_one(tmp_path: Path) -> None:
    load_program(write(tmp_path, f"def flax_loss(): return 1\njax_loss = flax_loss\n{DATA}"))


@pytest.mark.parametrize(
    "line",
    [
        "def val_data(): return 1\ndef test_data(): return val_data()",  # used
        "def val_data(): return 1\ndef test_data(): return 1",  # the near name is there too
        "epoch = 3\nprint(epoch, end='')",
        "__all__ = ['epoch']\nepoch = 3",
        "_epoch = 3",
        "import colorsys as epoch",
        "from colorsys import rgb_to_hsv as schedules",
        "def jax_optimizer(): return 1\nlearning_rate = 3",  # beside it, lr is a variable too
        "def f():\n    epoch = 3",
    ],
)
def test_a_helper_with_a_similar_name_is_none(line: str, tmp_path: Path) -> None:
    load_program(write(tmp_path, f"{line}\n{DATA}"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import jax.numpy as jnp\ndtype = jnp.bfloat16", 'dtype = bfloat16: .*must be str; 16 bits are amp = "bf16"'),
        (
            "import torch\ndtype = torch.float16",
            "dtype = torch.float16: is a flag of the trainers, and must be str; 16 bits",
        ),
        ("import optax\nschedule = optax.linear_schedule(1, 0, 9)", "schedule = .*must be str; an Optax schedule goes"),
        ("import optax\noptimizer = optax.adam(1e-3)", "optimizer = Gradient.*is called jax_optimizer"),
        ("def epochs(): return 3", "epochs = epochs: is a flag of the trainers, and must be int"),
    ],
)
def test_an_object_in_place_of_a_flags_value_is_refused(line: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"{line}\n{DATA}")
    with pytest.raises(InputError, match=rf"^{path}: {message}"):
        load_program(path)
    name = message.partition(" ")[0]
    load_program(write(tmp_path, f"{line}\n{DATA}assert {name}\n"))  # a variable of its code


@pytest.mark.parametrize("library", ["numpy", "jax.numpy", "torch"])
def test_a_dtype_may_be_an_object(library: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"import {library} as library\ndtype = library.float64\n{DATA}")
    assert load_program(path).defaults == {"dtype": "float64"}


@pytest.mark.parametrize(
    ("more", "flags", "rate", "decay"),
    [("", [], 1e-3, None), ("lr = 0.5\n", [], 0.5, None), ("lr = 0.5\n", ["--lr", "2", "--weight-decay", "1"], 2, 1)],
)
@pytest.mark.parametrize("data", [DATA, ""])  # with and without data
@pytest.mark.parametrize(("trainer", "name"), [(TrainerConfig, "jax"), (TorchTrainerConfig, "torch")])
def test_an_optimizer_reads_the_rate_of_the_file_or_of_a_flag(
    trainer: type[TrainerConfig],
    name: str,
    data: str,
    more: str,
    flags: list[str],
    rate: float,
    decay: float | None,
    tmp_path: Path,
) -> None:
    path = write(tmp_path, f"{more}{OPTIMIZER.replace('jax', name)}def sgd(*given): return given\n{data}")
    program, config = cli.program_and_flags([str(path), *flags], trainer, "train")
    assert program.bound(config).get(f"{name}_optimizer")() == (rate, decay)


def test_a_flag_that_the_optimizer_does_not_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, f"momentum = 0.9\n{OPTIMIZER}{DATA}")
    with pytest.raises(InputError, match=r"^--clip-grad-norm|^--eps 0.1: has no effect, because .* jax_optimizer$"):
        cli.program_and_flags([str(path), "--eps", "0.1"], TrainerConfig, "train")
    check_flags(program := load_program(path), default_config(program, TrainerConfig))  # momentum is a variable


@pytest.mark.parametrize(
    "call",
    [
        "from jaxddp.train import run\nrun(__file__)",
        "load_program(__file__)",
        "from jaxddp.parity import check\ncheck(__file__)",
    ],
)
def test_a_file_that_runs_itself_is_told_what_to_do(call: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"from jaxddp.program import load_program\n{DATA}{call}\n")
    for _ in range(2):  # and the second time alike
        with pytest.raises(InputError, match=rf'^{path}: runs itself while it is loaded; .*__name__ == "__main__"'):
            load_program(path)
    assert run_file(write(tmp_path, DATA)).__name__ == "run_run"


PACKAGE = {
    "shop/__init__.py": "",
    "shop/sizes.py": "WIDTH = 3\n",
    "shop/models/__init__.py": "from ..sizes import WIDTH as WIDE\n",
    "shop/models/net.py": "from . import WIDE\n",
    "shop/models/run.py": f"from dataclasses import dataclass\nfrom .net import WIDE\nfrom ..sizes import WIDTH\n{DATA}"
    "@dataclass\nclass Options:\n    width: int = WIDTH\n",
}


def package(folder: Path, width: int = 3) -> Path:
    for name, text in PACKAGE.items():
        write(folder, text.replace("3", f"{width}"), name)
    return folder


def test_a_file_in_a_package_imports_from_it(tmp_path: Path) -> None:
    for width in (3, 5):  # the second package has the same name
        path = package(tmp_path / f"{width}", width) / "shop" / "models" / "run.py"
        assert default_config(load_program(path), TrainerConfig).width == width  # type: ignore[attr-defined]


def test_workers_read_with_the_functions_of_a_file_in_a_package(tmp_path: Path) -> None:
    path = package(tmp_path) / "shop" / "models" / "run.py"
    path.write_text(
        path.read_text() + "def augment(example, rng):\n    from .net import WIDE\n    return {'x': WIDE}\n"
    )
    source = as_source({"x": np.zeros(4)}, augment=load_program(path).get("augment"))
    workers = DataWorkers(source, 1, timeout=60)
    try:
        assert [part["x"].tolist() for (part,) in workers.read([Job(0, (np.arange(2),))])] == [[3, 3]]
    finally:
        workers.close()


def test_a_module_is_run_as_python_m_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(package(tmp_path))
    program, config = cli.program_and_flags(["-m", "shop.models.run", "--width", "7"], TrainerConfig, "train")
    assert config.width == 7 and program.name == "shop/models/run.py"  # type: ignore[attr-defined]
    for words, message in {
        ("-m",): "-m: unknown flag",
        ("-m", "shop.nothing"): "-m shop.nothing: no such module in Python's path",
        ("-m", "nothing.at.all"): "-m nothing.at.all: ModuleNotFoundError: No module named 'nothing'",
        ("-m", "sys"): "-m sys: no such module",
    }.items():
        with pytest.raises(InputError, match=f"^{message}"):
            cli.program_and_flags(words, TrainerConfig, "train")
