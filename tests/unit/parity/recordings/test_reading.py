"""Recordings that cannot be read are told in one line, and examples are identified whatever their layout."""

import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import nn

from jaxddp.errors import InputError
from jaxddp.parity import Recorder, compare_runs
from jaxddp.parity.compare.clipping import NOT_CLIPPED, Clipping
from jaxddp.parity.recorder.batches import identified
from jaxddp.parity.recorder.files import step_file
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


def with_line(path: Path, number: int, edit: Callable[[str], str]) -> None:
    """Edit a line of the first process; line 0 is the header."""
    lines = (path / "rank0/run.jsonl").read_text().split("\n")
    lines[number] = edit(lines[number])
    (path / "rank0/run.jsonl").write_text("\n".join(lines))


def header_with(path: Path, **values: object) -> None:
    with_line(path, 0, lambda line: json.dumps({**json.loads(line), **values}))


def step_with(path: Path, number: int = 1, **values: object) -> None:
    with_line(path, number, lambda line: json.dumps({**json.loads(line), **values}))


def step_is(path: Path, number: object) -> None:
    """Give the second step another number."""
    step_with(path, 2, step=number, file=step_file(number) if isinstance(number, int) else "000002.safetensors")


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def without(path: Path, key: str) -> None:
    """Leave arrays out whose names begin so."""
    save_file({name: x for name, x in load_file(path).items() if not name.startswith(key)}, path)


def link_out(path: Path) -> None:
    """Put a file outside of its folder and a link in its place."""
    shutil.move(path, path.parents[2] / "elsewhere")
    path.symlink_to(path.parents[2] / "elsewhere")


def add_rank(path: Path, **values: object) -> None:
    shutil.copytree(path / "rank0", path / "rank1")
    lines = (path / "rank1/run.jsonl").read_text().split("\n")
    lines[0] = json.dumps({**json.loads(lines[0]), **values})
    (path / "rank1/run.jsonl").write_text("\n".join(lines))


LINES, ARRAYS = "rank0/run.jsonl", "rank0/000001.safetensors"
DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: shutil.rmtree(path), "no such folder"),
    (lambda path: (path / LINES).unlink(), "not a recording"),
    (lambda path: (path / LINES).write_text("{}\n"), "format is None"),
    (lambda path: (path / LINES).write_text("[1\n"), "damaged"),
    (lambda path: (path / LINES).write_text("7\n"), "damaged: TypeError: 7"),
    (lambda path: (path / LINES).write_text(""), "damaged"),
    (lambda path: (path / ARRAYS).unlink(), "no such file"),
    (lambda path: (path / ARRAYS).write_bytes(b"x" * 100), "damaged"),
    (lambda path: replaced(path / ARRAYS, lambda path: path.mkdir()), "is a folder; must be a file"),
    (lambda path: replaced(path / LINES, lambda path: path.mkdir()), "is a folder; must be a file"),
    (lambda path: replaced(path / ARRAYS, os.mkfifo), "is a pipe, a device or a socket; must be a regular file"),
    (lambda path: replaced(path / LINES, os.mkfifo), "is a pipe, a device or a socket; must be a regular file"),
    (lambda path: replaced(path / ARRAYS, lambda path: path.symlink_to("/dev/zero")), "is a pipe, a device"),
    (lambda path: link_out(path / ARRAYS), "is a link that leads out of its folder"),
    (lambda path: link_out(path / LINES), "is a link that leads out of its folder"),
    (lambda path: step_with(path, file="../../torch/rank0/000001.safetensors"), "damaged: step 1 .* file"),
    (lambda path: step_with(path, file="/etc/passwd"), "damaged: step 1 .* file '/etc/passwd'"),
    (lambda path: step_with(path, 2, file="000001.safetensors"), "damaged: step 2 .* file"),
    (lambda path: with_line(path, 1, lambda line: line[:-9]), "damaged"),
    (lambda path: with_line(path, 2, lambda line: line[:-9]), "damaged"),
    (lambda path: with_line(path, 0, lambda line: f"{line}\n{{"), "damaged"),
    *[(lambda path, n=n: step_is(path, n), "damaged: step") for n in (True, 2.0, "2", -2, 0, 1, None, 10**30)],
    (lambda path: header_with(path, world_size=2), "rank1 of 2 processes is missing"),
    (lambda path: header_with(path, world_size=-1), "damaged: world_size is -1"),
    (lambda path: header_with(path, world_size=True), "damaged: world_size is True"),
    (lambda path: header_with(path, world_size=10**9), "rank1 of 1000000000 processes is missing"),
    (lambda path: header_with(path, world_size=10**30), "damaged: world_size"),
    (lambda path: header_with(path, replicas=10**9), "damaged: .* has shape"),
    (lambda path: add_rank(path), "has rank1, and run.jsonl tells of 1 processes"),
    (lambda path: (header_with(path, world_size=2), add_rank(path, world_size=1)), "world_size differs"),
    (lambda path: (header_with(path, world_size=2), add_rank(path, replicas=2)), "damaged: .* has shape"),
    (lambda path: header_with(path, limit=3), "damaged: .* has shape"),
    (lambda path: header_with(path, tensors={"a": [["x"], "float32", "parameter"]}), "damaged: tensors"),
    (lambda path: header_with(path, tensors={"a": [[2**40], "float32", "parameter"]}), "damaged: tensors"),
    (lambda path: header_with(path, tensors={"0.weight": [[12, 9], "float32", "parameter"]}), "damaged: .* has shape"),
    (lambda path: header_with(path, modules={"": ["Sequential", 3]}), "damaged: modules"),
    (lambda path: header_with(path, tied={"a": "b"}), "description of its model is damaged"),
    (lambda path: step_with(path, groups=[{}]), "damaged: groups"),
    (lambda path: step_with(path, entries=None), "damaged: entries is None"),
    (lambda path: without(path / ARRAYS, "update"), "damaged: has no update"),
    (lambda path: without(path / ARRAYS, "params|0.bias"), "damaged: params lack some parameters"),
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


@pytest.mark.parametrize("kind", ["Muon", "lr_scheduler", "Optimizer", "Lion"])
def test_updates_are_compared_with_torchs_where_its_optimizer_cannot_be_replayed(
    kind: str, runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "torch", tmp_path / "torch")
    header_with(tmp_path / "torch", optimizer=kind)
    report = compare_runs(tmp_path / "torch", runs / "jax")
    assert report.verdict == "equal" and f"{kind} cannot be replayed, so updates are compared" in str(report)
    report = compare_runs(tmp_path / "torch", runs / "jax", {"Dense_0": "3"})  # names that do not pair off
    assert report.verdict == "incomplete", str(report)


def test_recordings_without_a_common_step_and_two_of_torch_are_refused(runs: Path, tmp_path: Path) -> None:
    train_jax(tmp_path / "late", steps=3, recorded=[3])
    with pytest.raises(InputError, match=r"no step is in both recordings: .*torch has 1, 2; .*late has 3"):
        compare_runs(runs / "torch", tmp_path / "late")
    with pytest.raises(InputError, match="is a recording of torch; must be of jax"):
        compare_runs(runs / "torch", runs / "torch")


def cut_line(path: Path) -> None:
    step_with(path, 2, step=7, file="000007.safetensors")
    lines = (path / LINES).read_text()
    (path / LINES).write_text(lines[:-9])


def cut_number(path: Path) -> None:
    lines = (path / LINES).read_text()
    (path / LINES).write_text(lines[: lines.rindex('"step": 2') + 5])


def cut_end(path: Path) -> None:
    lines = (path / LINES).read_text()
    (path / LINES).write_text(lines[:-1])


@pytest.mark.parametrize(
    ("kill", "steps", "unfinished"),
    [(lambda path: None, [1, 2], None), (cut_line, [1], 7), (cut_number, [1], 2), (cut_end, [1, 2], None)],
    ids=["nothing", "within a line", "within its number", "before its end"],
)
def test_a_recording_says_within_which_step_it_ends(
    kill: Callable[[Path], None], steps: list[int], unfinished: int | None, runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "torch", tmp_path / "torch")
    kill(tmp_path / "torch")
    run = Recording(tmp_path / "torch")
    assert ([*run.steps], run.unfinished) == (steps, unfinished)


def test_a_process_may_lack_the_last_steps_and_no_others(runs: Path, tmp_path: Path) -> None:
    path = tmp_path / "torch"
    shutil.copytree(runs / "torch", path)
    header_with(path, world_size=2)
    shutil.copytree(path / "rank0", path / "rank1")
    lines = (path / "rank1/run.jsonl").read_text().split("\n")
    (path / "rank1/run.jsonl").write_text("\n".join([*lines[:2], ""]))
    (path / "rank1/000002.safetensors").unlink()
    run = Recording(path)
    assert ([*run.steps], run.left_out, run.unfinished) == ([1], [2], 2)
    (path / "rank1/run.jsonl").write_text("\n".join([lines[0], lines[2], ""]))
    with pytest.raises(InputError, match="rank1 lacks step 1"):
        Recording(path)


def test_names_of_a_recording_are_printed_without_control_characters(tmp_path: Path) -> None:
    odd, x = "a\n\x1b[2J\x07", np.ones((4, 3), np.float32)
    model = nn.Sequential(OrderedDict({odd: nn.Linear(3, 2, bias=False)}))
    kernel = model.state_dict()[f"{odd}.weight"].numpy().T.copy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(tmp_path / "torch", 1)
    recorder.watch(model, optimizer)
    recorder.step({odd: x}, 0.0)
    for name in (odd, f"{odd}b"):  # a pair, and none
        recorder = Recorder(tmp_path / "jax", 1, overwrite=True)
        recorder.watch({name: {"kernel": kernel}})
        recorder.step({odd: x}, 1.0, updates={name: {"kernel": kernel}}, grads={name: {"kernel": kernel}})
        lines = str(compare_runs(tmp_path / "torch", tmp_path / "jax")).split("\n")
        assert any("x1b[2J" in line for line in lines)
        assert all(line.isprintable() for line in lines)


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
