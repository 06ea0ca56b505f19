"""Whatever is edited in a recording, the comparison gives a report or an error of one line."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jaxddp.errors import InputError
from jaxddp.parity import compare_runs
from tests.support.recorded_loops import train_jax, train_torch

NUMBERS = [True, 0, -1, 1, 3, 1.5, float("nan"), float("inf"), 10**9, 10**30]
WORDS = ["", "x", "0.weight", "params", "../../x", "/etc/passwd", "SGD", "LBFGS", "bfloat16", "Conv2d", "LSTM"]
OTHERS = [None, [], {}, [[]], {"a": 1}, [1]]
KEYS = ["params|0.weight", "params|x", "x|y", "|", "local_loss|b", "norms|gradients|0.weight", "samples|x:hash"]
SIDES = st.sampled_from(["torch", "jax"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train_torch(folder / "torch", steps=2, recorded=2, clip=0.5)
    train_jax(folder / "jax", steps=2, recorded=2, lr=lambda step: 1e-2)
    return folder


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path to each value within a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in pairs for place in places(item, (*path, key)))]


@st.composite
def line_edits(draw: st.DrawFn, line: Any) -> Any:
    """Replace, remove, rename or copy one value of a line."""
    *folders, key = draw(st.sampled_from(places(line)[1:]))
    parent = line
    for step in folders:
        parent = parent[step]
    edit = draw(st.sampled_from(["replace", "replace", "remove", "rename", "copy"]))
    if edit == "remove":
        del parent[key]
    elif edit == "rename" and isinstance(parent, dict):
        parent[draw(st.sampled_from([*WORDS, "num_heads", "named_modules"]))] = parent.pop(key)
    elif edit == "copy":
        parent[key] = draw(st.sampled_from([*parent.values()] if isinstance(parent, dict) else parent))
    else:
        parent[key] = draw(st.sampled_from([*NUMBERS, *WORDS, *OTHERS]))
    return line


def edit_bytes(data: st.DataObject, path: Path) -> None:
    content = path.read_bytes()
    start = data.draw(st.integers(0, len(content) - 1))
    end = data.draw(st.integers(start, min(start + 50, len(content))))
    path.write_bytes(content[:start] + data.draw(st.binary(max_size=8)) + content[end:])


def edit_arrays(data: st.DataObject, path: Path) -> None:
    arrays = {name: np.array(x) for name, x in load_file(path).items()}
    name = data.draw(st.sampled_from(sorted(arrays)))
    x = arrays.pop(name)
    edit = data.draw(st.sampled_from(["remove", "shape", "dtype", "values", "move"]))
    if edit == "shape":
        arrays[name] = data.draw(st.sampled_from([x[..., None], x.reshape(-1)[:1]]))
    elif edit == "dtype":
        with np.errstate(all="ignore"):
            arrays[name] = x.astype(data.draw(st.sampled_from(["float64", "int8", "float16", "bool"])))
    elif edit == "values" and x.dtype.kind == "f":
        arrays[name] = np.full_like(x, data.draw(st.sampled_from([np.nan, np.inf, 0.0, 1e30])))
    elif edit == "move":
        arrays[data.draw(st.sampled_from([*KEYS, *arrays]))] = x
    save_file(arrays, path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_an_edited_recording_gives_a_report_or_an_error_of_one_line(
    runs: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("edited")
    for side in ("torch", "jax"):
        shutil.copytree(runs / side, folder / side)
    part = folder / data.draw(SIDES) / "rank0"
    kind = data.draw(st.sampled_from(["line", "line", "line", "bytes", "arrays"]))
    if kind == "line":
        lines = (part / "run.jsonl").read_text().split("\n")
        number = data.draw(st.integers(0, len(lines) - 2))
        lines[number] = json.dumps(data.draw(line_edits(json.loads(lines[number]))))
        (part / "run.jsonl").write_text("\n".join(lines))
    else:
        path = part / data.draw(st.sampled_from(["run.jsonl", "000001.safetensors", "000002.safetensors"]))
        if kind == "bytes" or path.suffix == ".jsonl":
            edit_bytes(data, path)
        else:
            edit_arrays(data, path)
    try:
        report = str(compare_runs(folder / "torch", folder / "jax"))
    except InputError as error:
        report = str(error)
        assert "\n" not in report
    assert report
