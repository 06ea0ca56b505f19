"""Steps per dispatch by their time: few at first, then as many as fit; the same bits however they are grouped."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.data_parallel import DistributedDataParallel
from jaxddp.distributed.replicas import VirtualReplicas
from jaxddp.loader import Loader
from jaxddp.step import dispatch
from jaxddp.step.dispatch import LONGEST, Pace
from jaxddp.train import run


class Clock:
    """Time that passes only by `now`."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def paced(seconds: list[float], most: int = 32, slowest: int = 0) -> tuple[list[int], int]:
    """Return the steps per dispatch after each dispatch of so many seconds, and the dispatches in flight at the end."""
    clock, chosen = Clock(), [most]

    def choose(limit: int) -> int:
        chosen.append(min(limit, most))
        return chosen[-1]

    pace, steps = Pace(choose, lambda number: max(number, slowest), clock), []
    for of_dispatch in seconds:
        pace.begin()
        steps.append(chosen[-1])
        clock.now += of_dispatch
        pace.end()
    return [*steps, chosen[-1]], pace.run_ahead


@pytest.mark.parametrize(
    ("step", "steps", "run_ahead"),
    [(0.0005, 32, 8), (0.005, 16, 8), (0.02, 4, 8), (0.1, 1, 8), (0.3, 1, 3), (5.0, 1, 1)],
)
def test_what_is_in_flight_takes_a_second_at_most_or_one_dispatch(step: float, steps: int, run_ahead: int) -> None:
    assert paced([9.0, step, step, 99.0]) == ([1, 1, 1, steps, steps], run_ahead)  # the first compiles
    assert run_ahead == 1 or step * steps * run_ahead <= LONGEST
    assert paced([9.0, 99.0, step])[0][-1] == steps  # a pause of the machine does not count


def test_processes_go_by_the_slowest_of_them() -> None:
    assert paced([9.0, 0.001, 0.001], slowest=100_000)[0][-1] == 1


def dispatched(
    monkeypatch: pytest.MonkeyPatch, longest: float, **flags: Any
) -> tuple[list[int], dict[str, np.ndarray]]:
    """Train where a step fits into a dispatch up to so many seconds; return the steps of each dispatch, and weights."""
    monkeypatch.setattr(dispatch, "LONGEST", longest)
    counts: list[int] = []
    steps = DistributedDataParallel.steps

    def counted(ddp: DistributedDataParallel, state: Any, batches: MicroBatches) -> Any:
        counts.append(jax.tree.leaves(batches.last)[0].shape[1])
        return steps(ddp, state, batches)

    monkeypatch.setattr(DistributedDataParallel, "steps", counted)
    arrays = {"x": np.random.default_rng(0).normal(size=(90, 3)).astype(np.float32)}
    program = SimpleNamespace(
        train_data=lambda: arrays,
        jax_model=lambda: nnx.Linear(3, 3, rngs=nnx.Rngs(0)),
        jax_loss=lambda model, batch: ((model(batch["x"]) - batch["x"][:, ::-1]) ** 2).mean(axis=1),
    )
    given: dict[str, Any] = {"epochs": 2, "global_batch_size": 4, "platform": "cpu"}
    weights = run(program, **given | flags).weights
    monkeypatch.undo()
    return counts, weights


def test_steps_are_grouped_as_they_fit_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    single, weights = dispatched(monkeypatch, longest=1e-9)
    assert single == [1] * 46  # 22 steps and a smaller one in each epoch
    grouped, same = dispatched(monkeypatch, longest=1e9)
    assert grouped == [*[1] * 22, 1, 22, 1]
    given, also = dispatched(monkeypatch, longest=1e-9, steps_per_dispatch=8)
    assert given == [8, 8, 6, 1] * 2
    for name, value in weights.items():
        assert np.array_equal(value, same[name]) and np.array_equal(value, also[name])


def test_dispatches_end_where_tests_come(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Loader({"x": np.zeros(64)}, VirtualReplicas(2), global_batch_size=2, ends_every=12)
    assert [loader.choose_steps_per_dispatch(most) for most in (32, 3, 2, 1)] == [4, 2, 2, 1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_choice_holds_for_what_is_not_planned_yet(num_workers: int) -> None:
    """Processes that make it after the same step read the same batches, whatever their workers have read ahead."""
    data = {"x": np.arange(96.0)}
    loader = Loader(data, VirtualReplicas(2), global_batch_size=2, shuffle=False, num_workers=num_workers)
    loader.choose_steps_per_dispatch(1)
    counts, read = [], []
    for batch in loader.host_batches(0):
        if not counts:
            loader.choose_steps_per_dispatch(8)
        counts.append(batch.last["x"].shape[1])
        read += batch.last["x"].transpose(1, 2, 0).ravel().tolist()
    assert read == data["x"].tolist()
    assert counts == [*[1] * 8, *[8] * 5]
