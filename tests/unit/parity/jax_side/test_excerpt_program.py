"""The program of a large port records what the programs of all others do, and its replicas share a device."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from jaxddp.distributed.replicas import VirtualReplicas
from jaxddp.parity.case_interface import Trajectory
from jaxddp.parity.cases import PortCase
from jaxddp.parity.compare.whole import PARTS
from jaxddp.parity.jax_side import excerpt_program as program_module
from jaxddp.parity.jax_side import recorded_runs
from jaxddp.parity.jax_side.checked_step import forget_programs
from jaxddp.parity.jax_side.excerpt_program import FREE, MANY, QUICKLY, ExcerptProgram, excerpt_program
from jaxddp.parity.jax_side.recorded_runs import forced_records, free_records
from jaxddp.parity.port import PortFile
from jaxddp.parity.records import Record
from tests.support.small_port import UNEQUAL, Change, own_optimizers, step, wide, write

WIDE = wide(400)  # with one tensor of which records hold an excerpt
STEPS = 2
# Adam divides by a gradient's size: with its own eps of 1e-8 a gradient near 0 made the last bit of a sum 7e-14.
ADAMW = own_optimizers("AdamW(parameters, lr=0.01, eps=1e-4)", "optax.adamw(0.01, eps=1e-4)")
GROUPS: Change = ('pmean(local, "replica")', 'psum(local, "replica", axis_index_groups=[[0, 1]])')
DIVERGES: Change = ('jax.lax.pmean(local, "replica")', "local")


def case_of(folder: Path, *changes: Change, more: str = "") -> tuple[PortCase, dict[str, np.ndarray]]:
    """Return a wide port's case, and weights."""
    case = PortCase(PortFile(str(write(folder, *WIDE, *changes, more=more))), 2, STEPS)
    torch.manual_seed(0)
    state = case.port.torch_model().state_dict()
    return case, {name: tensor.double().numpy() for name, tensor in state.items()}


def of_both(monkeypatch: pytest.MonkeyPatch, make: Any, many: bool = False) -> list[list[Record]]:
    """Return the records of a model that counts as small, and of one that counts as large, or of many parameters."""
    small = [*make()]
    if many:
        monkeypatch.setattr(recorded_runs, "MANY", 0)
    else:
        monkeypatch.setattr(recorded_runs, "is_large_model", lambda start: True)
        monkeypatch.setattr(program_module, "is_large_model", lambda start: True)
    return [small, [*make()]]


ALLOWED = {"update": 1e-12}  # a difference of parameters, which round; measured: 1e-13
ALLOWED |= dict.fromkeys(PARTS, 1e-12)  # sums, some of them of updates; measured: 2e-14


def assert_same(ours: Record, theirs: Record, stages: Mapping[str, Any] | tuple[str, ...]) -> None:
    for stage in stages:
        assert ours[stage].keys() == theirs[stage].keys(), stage
        for name, value in theirs[stage].items():
            assert ours[stage][name].shape == value.shape, (stage, name)
            scale = float(np.linalg.norm(value)) or 1.0
            allowed = ALLOWED.get(stage, 1e-14)  # measured: 1e-15
            np.testing.assert_allclose(ours[stage][name] / scale, value / scale, rtol=0, atol=allowed, err_msg=stage)


@pytest.mark.one_in(4, first=3)
@pytest.mark.parametrize("many", [False, True], ids=["large", "many"])
@pytest.mark.parametrize(
    ("changes", "more", "lacks"),
    [
        ([ADAMW], "", ()),
        ([ADAMW], "clip_grad_norm = 0.05\n", ()),
        ([ADAMW], "", ("fc1.weight",)),
        ([], step(), ()),
        ([], step(DIVERGES), ()),
        ([], step(GROUPS), ()),
        ([UNEQUAL], "", ()),
    ],
    ids=["adamw", "clips", "frozen", "own step", "own step that diverges", "own step with groups", "unequal"],
)
def test_forced_records_are_those_of_a_small_model(
    changes: list[Change],
    more: str,
    lacks: tuple[str, ...],
    many: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, start = case_of(tmp_path, *changes, more=more)
    rng = np.random.default_rng(0)

    def record() -> Record:
        params = {name: x + 0.01 * rng.normal(size=x.shape) for name, x in start.items()}
        gradients = {name: rng.normal(size=x.shape) for name, x in start.items() if name not in lacks}
        return {"params": params, "buffers": {}, "gradients": gradients, "clipped_gradients": gradients}

    reference = Trajectory(start, [record() for _ in range(STEPS)])
    small, large = of_both(monkeypatch, lambda: forced_records(case, reference), many)
    assert len(small) == len(large) == STEPS
    for theirs, ours in zip(small, large, strict=True):
        stages = [stage for stage in theirs if stage != "params" or stage in ours]  # before the update, if it is apart
        assert_same(ours, theirs, (*stages,))
    assert {"local_gradients:wide.weight", "pure_local_gradients:wide.weight"} & {*large[0]["local_norms"]}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("many", [False, True], ids=["large", "many"])
@pytest.mark.parametrize("more", ["", step()], ids=["", "own step"])
def test_free_records_are_those_of_a_small_model(
    more: str, many: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, start = case_of(tmp_path, *([] if more else [ADAMW]), more=more)
    small, large = of_both(monkeypatch, lambda: free_records(case, start), many)
    assert small and {*FREE} & {*small[0]}
    for theirs, ours in zip(small, large, strict=True):
        assert_same(ours, theirs, (*(stage for stage in FREE if stage in theirs), "spread"))


def test_replicas_share_a_device_unless_a_step_cannot_be_vectorized(tmp_path: Path) -> None:
    for more, shares in (("", True), (step(), True), (step(GROUPS), False)):
        case, start = case_of(tmp_path, more=more)
        forget_programs()  # of the file as it was
        with jax.enable_x64(True):
            program = excerpt_program(case, start, forced=False)
        assert isinstance(program.replicas, VirtualReplicas) == shares


def test_many_small_parameters_share_a_device_and_are_compiled_quickly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, start = case_of(tmp_path)
    for size, name in (((1,), "small"), ((3000, 3000), "large")):
        weights = start | {f"{name}{number}": np.broadcast_to(0.0, size) for number in range(MANY)}
        with jax.enable_x64(True):
            program = recorded_runs._program(case, weights, None, None)
        assert isinstance(program, ExcerptProgram) and isinstance(program.replicas, VirtualReplicas)
        assert program.options == (QUICKLY if name == "small" else {}), (
            "the code of a large model is worth its compiler"
        )


class Counted(dict[str, Any]):
    """A record that counts how often a stage is read, which takes a file each time."""

    reads = 0

    def __getitem__(self, stage: str) -> Any:
        self.reads += 1
        return super().__getitem__(stage)


def test_the_reads_of_a_record_do_not_grow_with_its_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, start = case_of(tmp_path)
    monkeypatch.setattr(recorded_runs, "MANY", 0)
    reads = []
    for count in (1, 100):
        of_all = {str(number): np.zeros(1) for number in range(count)}
        record = Counted(params=start | of_all, clipped_gradients=start | of_all)
        with jax.enable_x64(True):
            recorded_runs._program(case, start, None, None, Trajectory(start, [record]))
        reads.append(record.reads)
    assert reads[0] == reads[1] > 0
