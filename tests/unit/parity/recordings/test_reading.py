"""Recordings that cannot be read are told in one line, and examples are identified whatever their layout."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxddp.errors import InputError
from jaxddp.parity import compare_runs
from jaxddp.parity.compare.clipping import NOT_CLIPPED, Clipping
from jaxddp.parity.recorder.batches import identified
from jaxddp.parity.recordings.clipping_rule import clipping_of
from jaxddp.parity.recordings.names import read_names
from jaxddp.parity.recordings.run import RecordedStep, Recording
from jaxddp.parity.recordings.samples import numbered
from tests.support.recorded_loops import train_jax, train_torch


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train_torch(folder / "torch", steps=2, recorded=2)
    train_jax(folder / "jax", steps=2, recorded=2)
    return folder


def header_with(path: Path, **values: object) -> None:
    lines = (path / "rank0/run.jsonl").read_text().splitlines()
    header = {**json.loads(lines[0]), **values}
    (path / "rank0/run.jsonl").write_text("\n".join([json.dumps(header), *lines[1:], ""]))


def step_with(path: Path, **values: object) -> None:
    header, step, *rest = (path / "rank0/run.jsonl").read_text().splitlines()
    (path / "rank0/run.jsonl").write_text("\n".join([header, json.dumps({**json.loads(step), **values}), *rest, ""]))


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: shutil.rmtree(path), "no such folder"),
    (lambda path: (path / "rank0/run.jsonl").unlink(), "not a recording"),
    (lambda path: (path / "rank0/run.jsonl").write_text("{}\n"), "format is None"),
    (lambda path: (path / "rank0/run.jsonl").write_text("[1\n"), "damaged"),
    (lambda path: (path / "rank0/run.jsonl").write_text(""), "damaged"),
    (lambda path: (path / "rank0/000001.safetensors").unlink(), "no such file"),
    (lambda path: (path / "rank0/000001.safetensors").write_bytes(b"x" * 100), "damaged"),
    (lambda path: header_with(path, world_size=2), "rank1 of 2 processes is missing"),
    (lambda path: header_with(path, world_size=-1), "damaged"),
    (lambda path: header_with(path, tensors={"a": [["x"], "float32", "parameter"]}), "damaged"),
    (lambda path: header_with(path, modules={"": ["Sequential", 3]}), "description of its model is damaged"),
    (lambda path: header_with(path, tied={"a": "b"}), "description of its model is damaged"),
    (lambda path: step_with(path, groups=[{}]), "damaged: KeyError"),
    (lambda path: step_with(path, entries=None), "damaged: AttributeError"),
    (lambda path: header_with(path, side="jax"), "is a recording of jax; must be of torch"),
]


@pytest.mark.parametrize(
    ("damage", "says"), DAMAGES, ids=[f"{number} {says}" for number, (_, says) in enumerate(DAMAGES)]
)
def test_bad_recordings_are_told_in_one_line(
    damage: Callable[[Path], object], says: str, runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "torch", tmp_path / "torch")
    damage(tmp_path / "torch")
    with pytest.raises(InputError, match=says) as error:
        compare_runs(tmp_path / "torch", runs / "jax")
    assert "\n" not in str(error.value)


def test_recordings_without_a_common_step_and_two_of_torch_are_refused(runs: Path, tmp_path: Path) -> None:
    train_jax(tmp_path / "late", steps=3, recorded=[3])
    with pytest.raises(InputError, match=r"no step is in both recordings: .*torch has 1, 2; .*late has 3"):
        compare_runs(runs / "torch", tmp_path / "late")
    with pytest.raises(InputError, match="is a recording of torch; must be of jax"):
        compare_runs(runs / "torch", runs / "torch")


def test_a_line_that_a_killed_run_left_unfinished_is_ignored(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "torch", tmp_path / "torch")
    with (tmp_path / "torch/rank0/run.jsonl").open("a") as file:
        file.write('{"step": 3, "fi')
    assert [*Recording(tmp_path / "torch").steps] == [1, 2]


class Step(RecordedStep):
    """A step whose stages are given."""

    def __init__(self, **stages: dict[str, np.ndarray]):
        self.number, self.notes, self._stages = 1, {}, stages

    def __getitem__(self, stage: str) -> dict[str, np.ndarray]:
        return self._stages.get(stage, {})


def step_of(**batch: np.ndarray) -> Step:
    step = Step(samples={name: x[None] for name, x in identified([batch]).items()})
    step.notes = {"entries": {name: [list(x.shape), str(x.dtype)] for name, x in batch.items()}}
    return step


def test_examples_are_equal_in_another_layout_and_after_rounding_and_others_are_not() -> None:
    images = np.random.default_rng(0).normal(size=(6, 3, 5, 4)).astype(np.float32)
    torch = step_of(x=images, y=np.arange(6))
    jax = step_of(label=np.arange(6, dtype=np.int32), image=images.transpose(0, 2, 3, 1) * np.float32(1 + 3e-7))
    of_torch, of_jax = numbered([torch], [jax], 1, 2**-23)
    assert of_torch[0].keys() == of_jax[0].keys() == {"x", "y"}
    for name in ("x", "y"):
        np.testing.assert_array_equal(of_torch[0][name], of_jax[0][name])
    rolled = step_of(x=np.roll(images, 1, axis=0), y=np.arange(6))
    of_torch, of_jax = numbered([torch], [rolled], 1, 2**-23)
    np.testing.assert_array_equal(of_jax[0]["x"], np.roll(of_torch[0]["x"], 1, axis=1))
    noisy = step_of(x=images + 1e-3, y=np.arange(6))
    of_torch, of_jax = numbered([torch], [noisy], 1, 2**-23)
    assert not np.isin(of_jax[0]["x"], of_torch[0]["x"]).any()


def test_clipping_is_read_off_the_gradients() -> None:
    rng = np.random.default_rng(0)
    gradients = [{"w": rng.normal(size=20), "b": rng.normal(size=3)} for _ in range(3)]

    def steps(change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> list[RecordedStep]:
        return [Step(gradients=of_step, clipped_gradients=change(of_step)) for of_step in gradients]

    def by_norm(of_step: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        norm = np.sqrt(sum(np.sum(x**2) for x in of_step.values()))
        return {name: 0.5 / (norm + 1e-6) * x for name, x in of_step.items()}

    def by_value(of_step: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: np.clip(x, -0.3, 0.3) for name, x in of_step.items()}

    assert clipping_of(steps(by_norm)) == Clipping(0.5)
    assert clipping_of(steps(by_value)) == Clipping(largest=0.3)
    assert clipping_of(steps(lambda of_step: {})) == NOT_CLIPPED
    assert clipping_of(steps(lambda of_step: {name: x**3 for name, x in of_step.items()})) is None


def test_a_table_of_names_is_read_and_not_executed(tmp_path: Path) -> None:
    path = tmp_path / "names.py"
    for text in ('{"a": "b", "c": part("d", 1, of=3)}', 'import os\nnames = {"a": "b", "c": part("d", 1, of=3)}\n'):
        path.write_text(text)
        assert str(read_names(path)) == "{'a': 'b', 'c': part(\"d\", 1, of=3)}"
    for text in ("names = {'a': exit()}", "names = 3", "x = {}", "names = {", "names = {'a': open('b')}"):
        path.write_text(text)
        with pytest.raises(InputError, match="names"):
            read_names(path)
