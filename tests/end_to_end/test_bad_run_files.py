"""Programs that cannot be used: each is refused in one line, by both trainers."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxddp import cli
from jaxddp.config import TrainerConfig
from jaxddp.errors import InputError, TrainingError
from jaxddp.program import load_program
from jaxddp.scripts import refuse_exits
from tests.support.run_files import LINE, OWN_OPTIMIZERS, SQUARE, in_jax, in_torch, write

DATA = "return data(75, 0)"
BAD_FILES: list[tuple[str, str, str]] = [
    (
        LINE,
        f"{LINE}\nglobal_batch_siz = 3\ndel global_batch_size",
        "global_batch_siz: not a name of a program",
    ),
    ('"sgd", 0.05', '"sgd", "fast"', "lr = 'fast': is a flag of the trainers, and must be float"),
    ('"sgd", 0.05', '"sdg", 0.05', "optimizer sdg: unknown; did you mean sgd?"),
    ("width: int = 4", "epochs: int = 4", "Options.epochs: is a name of the trainer; choose another"),
    ("width: int = 4", "base_lr: float = 4.0", "Options.base_lr: is a name of the trainer; choose another"),
    ("width: int = 4", "no_shuffle: bool = True", "Options.no_shuffle: is a name of the trainer; choose another"),
    ("width: int = 4", "width: int = 4.5", "Options.width = 4.5: must be int"),
    ("width: int = 4", "width: 'Any' = 4", "Options: name 'Any' is not defined"),
    ("width: int = 4", "width: dict[str, int] = None", "Options.width: must be bool, int, float, str, Path, Literal"),
    ("width: int = 4", "width: list[dict] = ()", "Options.width: must be bool, int, float, str, Path, Literal, None"),
    (
        "width: int = 4",
        "width: int = 4\n    def __post_init__(self): raise ValueError('too narrow')",
        "line 18: ValueError: too narrow",
    ),
    (LINE, f"{LINE}\nbetas = [0.9, 0.95]", "betas 0.9 0.95: only for optimizer adam"),
    (LINE, f"{LINE}\nglobal_batch_size = np.int64(0)", "global_batch_size 0: must be at least 1"),
    (LINE, f"{LINE}\nverify_every = None", "verify_every = None: is a flag of the trainers, and must be int"),
    ("width: int = 4", "width: int", "Options.width: has no default; give it one"),
    ("width: int = 4", "width: object = None", "Options.width: must be bool, int, float, str, Path, Literal, None,"),
    ("@dataclass\nclass Options", "class Options", "Options: must be a dataclass"),
    ("class Options", "class Sizes", "jax_model takes options, and the file has no dataclass Options"),
    ("def train_data():\n    return data(75, 0)", "train_data = 3", "train_data: must be a function, and is int"),
    (DATA, "return 3", "train_data(): must be a dictionary of arrays, or have __len__ and __getitem__, and is int"),
    (DATA, "return {}", "train_data(): must be a dictionary or tuple of arrays"),
    (DATA, "raise OSError('no disk')", "line 27: OSError: no disk"),
    (DATA, "raise SystemExit('bye')", "line 27: SystemExit: bye"),
    ("import torch\n", "import torch\nimport nowhere\n", "line 7: ModuleNotFoundError: No module named 'nowhere'"),
    ("return self.fc2(nnx", "return self.fc3(nnx", "line 40: AttributeError: 'Net' object has no attribute 'fc3'"),
    (
        "return Net(",
        "return (lambda *_: 3)(",
        "jax_model: must return a flax.nnx or flax.linen module, or a tree",
    ),
]
METRICS = 'return {"error": abs(outputs - batch["y"])}'
# These are refused by both trainers with the same words, but for the prefix of a function's name.
BAD_RESULTS: list[tuple[str, str, str]] = [
    (
        SQUARE,
        "    return None\n",
        "_loss: must return the loss, or one per element, or a pair of these and their weights",
    ),
    (SQUARE, '    return model(batch["x"])[:0]\n', "; must be a mean, or have a row for each"),
    (SQUARE, '    return (batch["y"] ** 2).mean()\n', "_loss: "),
    (METRICS, "return [1]", "metrics: must return a dictionary of metrics, and returns list"),
    (METRICS, 'return {"error": "x"}', "metrics: error: must be numbers, and is str"),
    (METRICS, "return {3: outputs}", "metrics: 3: must be text, as the name of a metric"),
    (METRICS, 'return {"error": outputs[:0]}', "metrics: error: has shape (0,); must be a mean, or one value for each"),
    ("def metrics(", "def title(): return 3\ndef metrics(", "title: must return text, and returns int"),
    ("import torch\n", "import torch\nrho = 0.5\n", "rho 0.5: only for optimizer adadelta, not sgd"),
    ('{"error": ', '{"loss": ', "metrics: loss: is a metric of the step, or of the loss; choose another name"),
]


@pytest.mark.parametrize(
    ("before", "after", "message", "train"),
    [(*case, in_jax) for case in BAD_FILES] + [(*case, train) for case in BAD_RESULTS for train in (in_jax, in_torch)],
)
def test_bad_files_are_refused_in_one_line(
    before: str, after: str, message: str, train: Callable[..., Any], tmp_path: Path
) -> None:
    path = write(tmp_path, (before, after))
    with pytest.raises(InputError) as refused:
        train(path, tmp_path / "run")
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert str(refused.value).count("run.py") == 1
    assert train is in_torch or not (tmp_path / "run" / "config.json").exists()  # torch finds some in its first step


@pytest.mark.one_in(3)
@pytest.mark.parametrize("train", [in_jax, in_torch])
@pytest.mark.parametrize("function", ["train_data", "test_data"])
def test_nan_in_the_data_is_reported_with_its_place(function: str, train: Callable[..., Any], tmp_path: Path) -> None:
    nan = (f"def {function}():\n    return data(", f"def {function}():\n    return with_nan(")
    more = (
        "\ndef with_nan(size, seed):\n    batch = data(size, seed)\n    batch['x'][17, 2] = np.nan\n    return batch\n"
    )
    path = write(tmp_path, nan, more=more)
    with pytest.raises(
        TrainingError, match=rf"loss is nan at step \d+; .*run\.py: {function}\(\): example 17: x\[2\] is nan"
    ):
        train(path, tmp_path / "run", epochs=1)


@pytest.mark.parametrize(("train", "answer"), [(in_jax, "'halt'"), (in_torch, "'halt'"), (in_jax, "True")])
def test_an_answer_of_on_epoch_end_that_means_nothing_is_refused(
    train: Callable[..., Any], answer: str, tmp_path: Path
) -> None:
    path = write(tmp_path, more=f"\ndef on_epoch_end(epoch, step, metrics): return {answer}\n")
    with pytest.raises(InputError, match=rf'on_epoch_end: must return None, or "stop" .* returns {answer}$'):
        train(path, tmp_path / "run", epochs=1)


@pytest.mark.parametrize("name", ["", "run.txt", "run.pyc"])
def test_only_python_files_are_run(name: str, tmp_path: Path) -> None:
    write(tmp_path, name=name or "run.py")
    with pytest.raises(InputError, match=r"^[^:]*: must be a Python file, \*\.py$"):
        load_program(tmp_path / name)


def test_a_file_cannot_end_the_command_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", os._exit)  # restored after the test
    refuse_exits()
    path = write(tmp_path, (DATA, "import os; os._exit(0)"))
    with pytest.raises(InputError, match=r"run\.py: line 27: os\._exit\(0\)$"):
        in_jax(path, tmp_path / "run")


STEP = "def jax_step(model, optimizers, batch): return 1.0\n"


@pytest.mark.parametrize(
    ("flags", "more", "message"),
    [
        (
            ("--weight-decay", "0.1"),
            OWN_OPTIMIZERS,
            "--weight-decay 0.1: has no effect, because {path} has jax_optimizer",
        ),
        (("--clip-grad-norm", "1"), STEP, "--clip-grad-norm 1.0: has no effect, because {path} has jax_step"),
        (("--widht", "3"), "", "--widht: unknown flag; did you mean --width?"),
        (("--width", "x"), "", "--width x: expected INT"),
        (("extra",), "", "extra: unexpected argument; see --help"),
    ],
)
def test_bad_flags_are_refused_in_one_line(flags: tuple[str, ...], more: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, (LINE, "epochs = 2"), more=more)
    with pytest.raises(InputError) as refused:
        cli.program_and_flags([str(path), *flags], TrainerConfig, "train")
    assert str(refused.value) == message.format(path=path)


LINES = """

def wrong(g):
    raise ValueError("wrong")

@jax.custom_vjp
def in_jax(x): return x
in_jax.defvjp(lambda x: (x, None), lambda _, g: wrong(g))

class InTorch(torch.autograd.Function):
    @staticmethod
    def forward(context, x): return x.clone()
    @staticmethod
    def backward(context, g): return wrong(g)

def backward(x):
    return InTorch.apply(x) if isinstance(x, torch.Tensor) else in_jax(x)

class Examples:
    def __len__(self): return 75
    def __getitem__(self, index): return {"x": np.zeros(3, np.float32), "y": at(index)}

def at(index):
    return 0.5 if index in (0, 74) else wrong(index)
"""


@pytest.mark.parametrize("train", [in_jax, in_torch])
@pytest.mark.parametrize(
    ("change", "flags", "functions"),
    [
        (SQUARE.replace("return (", "return wrong("), {}, ["jax_loss", "wrong"]),
        (SQUARE.replace("(model", "backward(model", 1), {}, ["wrong"]),
        ("return Examples()", {}, ["__getitem__", "at", "wrong"]),
        ("return Examples()", {"data_workers": 1}, ["__getitem__", "at", "wrong"]),
    ],
    ids=["loss", "backward", "examples", "worker"],
)
def test_the_users_frames_come_with_an_error(
    change: str, flags: dict[str, Any], functions: list[str], train: Callable[..., Any], tmp_path: Path
) -> None:
    """Wherever the code runs: in a loss, in a function that a framework calls back, in a worker process."""
    path = write(tmp_path, (DATA if "Examples" in change else SQUARE, change), more=LINES)
    with pytest.raises(InputError, match="ValueError: wrong") as refused:
        train(path, tmp_path / "run", **flags)
    if train is in_torch:
        functions = [name.replace("jax", "torch") for name in functions]
    names = [frame.partition(", ")[2].partition(":")[0] for frame in refused.value.frames]
    assert [name for name in names if name in functions][-len(functions) :] == functions
    assert refused.value.frames[-1].endswith('wrong: raise ValueError("wrong")')
