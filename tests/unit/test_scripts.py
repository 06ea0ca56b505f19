"""What a user's file raises is told with the user's own lines, and what this project raises is left as it is."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxddp import scripts
from jaxddp.errors import InputError, TrainingError, check_weights
from jaxddp.parity.records import Lazy
from jaxddp.scripts import MOST_FRAMES, errors_located, is_of_user, run_file

FILE = """
import numpy as np
from layers import Layer

def model(calls):
    return np.vectorize(Layer(calls))(0)

def library_fails():
    return np.reshape([1, 2], 3)

def raises_again():
    try:
        return model(0)
    except ValueError as error:
        raise KeyError("again") from error
"""
LAYERS = """
class Layer:
    def __init__(self, calls):
        self.calls = calls
    def __call__(self, x):
        if self.calls == 0:
            raise ValueError("no more")
        self.calls -= 1
        return self(x)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a user's file as a module, whose neighbour lies in another folder."""
    monkeypatch.chdir(tmp_path)
    for name, text in {"mine/run.py": FILE, "lib/layers.py": LAYERS}.items():
        Path(name).parent.mkdir()
        Path(name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    yield run_file(Path("mine/run.py"))
    sys.modules.pop("layers")


def raised(module: Any, name: str, *arguments: Any, **named: Any) -> InputError:
    with pytest.raises(InputError) as caught, errors_located("mine/run.py", **named):
        getattr(module, name)(*arguments)
    return caught.value


def test_an_error_has_the_users_frames_from_the_outermost_and_none_of_a_package(module: Any) -> None:
    error = raised(module, "model", 1)
    assert str(error) == "mine/run.py: line 6: ValueError: no more"
    assert error.frames[1:] == (
        "run.py:6, model: return np.vectorize(Layer(calls))(0)",
        "lib/layers.py:9, __call__: return self(x)",
        'lib/layers.py:7, __call__: raise ValueError("no more")',
    )
    (last,) = raised(module, "library_fails").frames[1:]  # the line that calls the package
    assert last == "run.py:9, library_fails: return np.reshape([1, 2], 3)"


def test_an_error_from_another_has_the_frames_of_both(module: Any) -> None:
    error = raised(module, "raises_again")
    assert str(error) == "mine/run.py: line 15: KeyError: 'again'"
    places = [frame.partition(", ")[0] for frame in error.frames if not frame.startswith(__file__)]
    assert places == ["run.py:13", "run.py:6", "lib/layers.py:7", "run.py:15"]  # as Python prints them


def test_the_frames_of_a_recursion_are_cut_in_the_middle(module: Any) -> None:
    frames = raised(module, "model", 100).frames
    assert len(frames) == MOST_FRAMES + 1 and frames[MOST_FRAMES // 2] == f"... {103 - MOST_FRAMES} more ..."
    assert frames[1].startswith("run.py:6") and frames[-1].startswith("lib/layers.py:7")


def test_errors_of_the_file_itself_have_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.py").write_text("import wrong\n")
    Path("wrong.py").write_text("\nx = = 1\n")
    with pytest.raises(InputError, match=r"^wrong\.py: line 2: SyntaxError: invalid syntax$") as caught:
        run_file(Path("run.py"))
    assert caught.value.frames == ("run.py:1, <module>: import wrong", "wrong.py:2, <module>: x = = 1")


def test_only_errors_of_the_users_code_are_located_on_request(module: Any) -> None:
    of_user, of_project = Lazy(lambda: 1, lambda index: module.model(index)), Lazy(lambda: 1, check_weights)
    with pytest.raises(InputError, match=r"^mine/run\.py: line 6: ValueError: no more$"):  # noqa: SIM117
        with errors_located("mine/run.py", only_users=True):
            of_user[0]
    with pytest.raises(TypeError, match="missing 2 required"), errors_located("mine/run.py", only_users=True):
        of_project[0]
    with pytest.raises(TrainingError), errors_located("mine/run.py", only_users=True):
        raise TrainingError("the loss is nan")


def test_files_beside_python_are_a_users_and_packages_are_not() -> None:
    """In containers Python is in /usr, and so may be a user's files."""
    assert is_of_user(f"{Path(sys.base_prefix, 'src', 'app', 'run.py')}")
    assert not any(is_of_user(package.__file__) for package in (os, np, pytest, scripts))
