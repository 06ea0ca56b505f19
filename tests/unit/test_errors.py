"""Text of a user, a file or another process is printed on one line, without characters that control a terminal."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from jaxddp import cli
from jaxddp.config import TrainConfig
from jaxddp.config.launcher import HalfSetError
from jaxddp.data.weight_files import check_types, read_types
from jaxddp.distributed import joining
from jaxddp.distributed.peers import end_process
from jaxddp.errors import (
    LONGEST,
    DriftError,
    InputError,
    LostError,
    NotFiniteError,
    TrainingError,
    described,
    on_one_line,
    reason,
    shortened,
    tell,
)
from jaxddp.parity.report.markup import escape
from jaxddp.tracking.console import Console
from jaxddp.tracking.run_folder import CONFIG_FILE, load_config

HOSTILE = "a\nb\rc\x1b[2J\x07\x9b31m\u202e\u2028\u2066\x85\0\ud800"
text = st.text(st.characters(exclude_categories=())) | st.text("\x1b\r\n\x07\u202e[2Jab \ud800\x9b", max_size=40)


@settings(deadline=None)
@given(text)
@example(HOSTILE)
@example("\n" * 3 * LONGEST)
def test_errors_are_one_line_whatever_they_quote(quoted: str) -> None:
    for kind in (InputError, TrainingError, LostError, NotFiniteError, DriftError, HalfSetError):
        error = kind(f"--flag {quoted}: is wrong")
        assert str(error).isprintable() and len(str(error)) <= LONGEST
        assert str(error).startswith("--flag ") and str(error).endswith(": is wrong")
        assert str(pickle.loads(pickle.dumps(error))) == str(kind(str(error))) == str(error)


@settings(deadline=None)
@given(text, st.integers(20, 200))
@example(HOSTILE, 20)
@example("\x1b" * 1000, 100)
def test_quoted_text_is_one_short_line(quoted: str, most: int) -> None:
    error = ValueError(f"{quoted}\n{quoted}")
    for line in (on_one_line(quoted), shortened(quoted), reason(error), described(error), reason(OSError(2, quoted))):
        assert line.isprintable()
    assert len(on_one_line(quoted, most)) <= most
    assert len(shortened(quoted, most)) <= 10 * most + 30  # each escaped


@pytest.mark.parametrize(
    "show",
    [
        tell,
        Console(1, 1, quiet=False).print,
        lambda line: end_process(line, False, 2),
    ],
)
def test_printed_lines_are_single(
    show: Callable[[str], None], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: None)
    show(f"process 1 failed: {HOSTILE}")
    [line] = "".join(capfd.readouterr()).splitlines()
    assert line.isprintable() and "process 1 failed: a" in line


def test_errors_of_the_system_and_of_memory_are_printed_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (OSError(2, "No such file", HOSTILE), MemoryError(HOSTILE), InputError(HOSTILE)):
        with pytest.raises(SystemExit), cli.one_line_errors(show_traceback=False):
            raise error
        [line] = capsys.readouterr().err.splitlines()
        assert line.isprintable(), line


def test_pages_hold_no_characters_that_reorder_their_text() -> None:
    assert {"\u202e", "\x1b", "\u2066", "\r"} & {*escape(HOSTILE)} == set()


def _weights(folder: Path) -> None:
    name = HOSTILE.replace("\ud800", "")
    (folder / "w.safetensors").write_bytes(save({name: np.zeros(1, np.uint8)}))
    check_types(read_types(folder / "w.safetensors", "--weights"), {name: True})


def _config(folder: Path) -> None:
    (folder / CONFIG_FILE).write_text(json.dumps({"model": HOSTILE, HOSTILE: 1}))
    load_config(folder, TrainConfig)


def _hello(folder: Path) -> None:
    hello = {"process": 1, "size": 2, "config": {"model": HOSTILE}, "failure": None}
    joining._check_fits(hello, {"size": 2, "config": {"model": "mlp"}}, ())


def _failure(folder: Path) -> None:
    joining._check_fits({"process": 1, "size": 2, "config": {}, "failure": HOSTILE}, {"size": 2, "config": {}}, ())


def _variable(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, cli.variables_named("JAXDDP_TEST"):
        patch.setenv("JAXDDP_TEST", HOSTILE.replace("\0", "").replace("\ud800", ""))
        raise ValueError(HOSTILE)


@pytest.mark.parametrize("read", [_weights, _config, _hello, _failure, _variable])
def test_what_files_and_processes_say_is_cleaned(read: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        read(tmp_path)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 1000
