"""Options of a program in every kind: as flags, in config.json, in a resumed run, and in another process."""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest

from jaxddp import cli
from jaxddp.config import TrainerConfig
from jaxddp.errors import InputError
from jaxddp.program import Program
from jaxddp.tracking.run_folder import load_config, save_config
from torch_ref.config import TorchTrainerConfig

FILE = """
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

@dataclass
class Options:
    act: Literal["relu", "gelu"] = "relu"
    depth: Literal[2, 4] | None = None
    folder: Path = Path("data")
    cache: Path | None = None
    widths: list[int] = field(default_factory=lambda: [8, 4])
    parts: list[Path] = field(default_factory=list)
    shape: tuple[int, int] = (3, 3)
    folds: tuple[Literal["a", "b"], ...] = ()

def jax_model(options): return options
"""
FLAGS = [
    "--act",
    "gelu",
    "--depth",
    "4",
    "--folder",
    "d/e",
    "--cache",
    "c",
    "--widths",
    "1",
    "2",
    "--parts",
    "p",
    "q",
    "--shape",
    "5",
    "6",
    "--folds",
    "b",
    "a",
]
VALUES = {
    **{"act": "gelu", "depth": 4, "folder": Path("d/e"), "cache": Path("c"), "widths": [1, 2]},
    **{"parts": [Path("p"), Path("q")], "shape": (5, 6), "folds": ("b", "a")},
}
DEFAULTS = {
    **{"act": "relu", "depth": None, "folder": Path("data"), "cache": None, "widths": [8, 4]},
    **{"parts": [], "shape": (3, 3), "folds": ()},
}


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    (tmp_path / "kinds.py").write_text(FILE)
    return str(tmp_path / "kinds.py")


def options_of(program: Program, config: Any) -> dict[str, Any]:
    """Return what a function of the file gets."""
    return vars(program.bound(config).get("jax_model")())


@pytest.mark.parametrize("trainer", [TrainerConfig, TorchTrainerConfig])
@pytest.mark.parametrize(("flags", "values"), [(FLAGS, VALUES), ([], DEFAULTS)])
def test_every_kind_of_option_reaches_the_program(
    trainer: type[TrainerConfig], flags: list[str], values: dict[str, Any], run_file: str, tmp_path: Path
) -> None:
    program, config = cli.program_and_flags([run_file, *flags], trainer, "train")
    assert options_of(program, config) == values
    save_config(config, tmp_path)
    saved = load_config(tmp_path, type(config))
    assert saved == config and options_of(program, saved) == values
    in_other_process = pickle.loads(pickle.dumps(config))
    assert dataclasses.asdict(in_other_process) == dataclasses.asdict(config)


def test_a_resumed_run_has_its_options_again_and_flags_override_them(run_file: str, tmp_path: Path) -> None:
    program, config = cli.program_and_flags([run_file, *FLAGS], TrainerConfig, "train")
    config = dataclasses.replace(config, output=None)
    (folder := tmp_path / "run").mkdir()
    save_config(config, folder)
    (folder / "program.json").write_text('{"file": "kinds.py", "statements": {}}')
    argv = [run_file, "--resume", str(folder), "--widths", "9", "--act", "relu"]
    program, resumed = cli.program_and_flags(argv, TrainerConfig, "train")
    assert options_of(program, resumed) == VALUES | {"widths": [9], "act": "relu"}
    assert resumed.changes(dataclasses.asdict(config)) == ["--act relu instead of gelu", "--widths 9 instead of 1 2"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--act tanh", r"--act tanh: unknown \(one of relu, gelu\)"),
        ("--depth 3", r"--depth 3: unknown \(one of 2, 4\)"),
        ("--widths 1 x", r"--widths 1 x: expected \[INT \[INT ...\]\]"),
        ("--shape 1", "--shape 1: expected INT INT"),
        ("--folds c", r"--folds c: unknown \(one of a, b\)"),
    ],
)
def test_a_bad_value_is_refused_in_one_line(flags: str, message: str, run_file: str) -> None:
    with pytest.raises(InputError, match=f"^{message}$"):
        cli.program_and_flags([run_file, *flags.split()], TrainerConfig, "train")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('= "relu"', '= "tanh"', "Options.act = 'tanh': must be relu or gelu"),
        ('= Path("data")', "= 3", "Options.folder = 3: must be Path"),
        ("[8, 4]", '["a"]', r"Options.widths = \('a',\): must be list"),
    ],
)
def test_a_bad_default_is_refused_in_one_line(before: str, after: str, message: str, run_file: str) -> None:
    Path(run_file).write_text(FILE.replace(before, after))
    with pytest.raises(InputError, match=f"^{run_file}: {message}$"):
        cli.program_and_flags([run_file], TrainerConfig, "train")
