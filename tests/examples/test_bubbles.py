"""Bubbles example: both frameworks' marks show which replica waits, and impossible marks are refused.

Replicas sleep instead of computing, so that the assertions do not depend on how busy the machine is.
"""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest

from examples.bubbles import cases, in_jax, measured, trace
from examples.bubbles.__main__ import table
from examples.bubbles.cases import Case, Plan
from examples.bubbles.measured import Cases, Measurement
from examples.bubbles.picture import draw, figure_of
from examples.bubbles.trace import ALL_REDUCE, BACKWARD, FORWARD, START, WAITING, Span, timeline
from jaxddp.distributed.replicas import Replicas

pytestmark = pytest.mark.large

PAUSE = 0.15  # seconds; without it a step takes 3 ms, or 30 ms on a busy machine
BOTH, ONE = (PAUSE, PAUSE), (0.0, PAUSE)
PLAN = Plan(
    {
        cases.BALANCED: Case(pause=BOTH),
        cases.UNBALANCED: Case(pause=ONE),
        cases.IN_TURNS: Case(passes=((2, 1), (1, 2)), pause=BOTH),
        cases.BATCH_NORM: Case(passes=((2, 1), (1, 2)), pause=ONE, sync_batch_norm=True),
        cases.LOSS_ALONE: Case(frozen=(3, 0), pause=ONE, sync_loss=True),
        cases.LOSS_TOGETHER: Case(frozen=(3, 0), pause=BOTH),
    },
    steps=3,
    examples=16,
    features=8,
)
MEETING = [WAITING, ALL_REDUCE]
PLAIN = [FORWARD, BACKWARD, *MEETING]
PHASES = dict.fromkeys(PLAN.cases, PLAIN) | {
    cases.BATCH_NORM: [*2 * [FORWARD, *MEETING], FORWARD, *3 * [BACKWARD, *MEETING]],
    cases.LOSS_ALONE: [FORWARD, *MEETING, BACKWARD, *MEETING],
}
IDLE, BALANCED, IN_TURNS, BATCH_NORM, LOSS_ALONE, LOSS_TOGETHER, SAME_LOSS, AT_ONCE, SAME = range(9)


@pytest.fixture(scope="module")
def replicas() -> Replicas:
    return Replicas(jax.devices()[: cases.REPLICAS])


@pytest.fixture(scope="module")
def frameworks(replicas: Replicas) -> dict[str, Cases]:
    return {"JAX": measured.of_jax(PLAN, replicas), "torch": measured.of_torch(PLAN)}


def failing(ours: Cases, theirs: Cases, all_reduces: tuple[int, ...] = (1, 1)) -> list[int]:
    return [number for number, claim in enumerate(measured.claims(ours, theirs, all_reduces)) if not claim.holds]


@pytest.mark.parametrize("framework", ["JAX", "torch"])
def test_phases_come_in_order_and_without_gaps(frameworks: dict[str, Cases], framework: str) -> None:
    for name, case in frameworks[framework].items():
        assert len(case.steps) == PLAN.steps
        for spans in itertools.chain(*case.steps):
            assert [span.phase for span in spans] == PHASES[name], name
            assert all(span.begin <= span.end for span in spans)
            assert all(before.end == after.begin for before, after in itertools.pairwise(spans))


@pytest.mark.parametrize("framework", ["JAX", "torch"])
def test_waiting_ends_when_the_last_replica_arrives(frameworks: dict[str, Cases], framework: str) -> None:
    for case in frameworks[framework].values():
        for step in case.steps:
            meetings = [[span for span in spans if span.phase == WAITING] for spans in step]
            for together in zip(*meetings, strict=True):
                assert {span.end for span in together} == {max(span.begin for span in together)}


@pytest.mark.parametrize("framework", ["JAX", "torch"])
@pytest.mark.parametrize("name", [cases.UNBALANCED, cases.BATCH_NORM, cases.LOSS_ALONE])
def test_the_faster_replica_waits_at_the_first_all_reduce(
    frameworks: dict[str, Cases], framework: str, name: str
) -> None:
    steps = frameworks[framework][name].steps
    first_waits = [[next(span for span in spans if span.phase == WAITING) for spans in step] for step in steps]
    early, late = np.median([[wait.end - wait.begin for wait in waits] for waits in first_waits], axis=0)
    assert early > 0.5e9 * PAUSE and late == 0
    assert all(spans[0].end - spans[0].begin >= 1e9 * PAUSE for _, spans in steps)  # replica 1 slept in this phase


def test_claims_fail_for_swapped_cases(frameworks: dict[str, Cases]) -> None:
    ours, theirs = frameworks.values()
    swapped = ours | {cases.BALANCED: ours[cases.UNBALANCED], cases.UNBALANCED: ours[cases.BALANCED]}
    assert {IDLE, BALANCED} <= set(failing(swapped, theirs))
    assert failing(ours | {cases.LOSS_TOGETHER: ours[cases.LOSS_ALONE]}, theirs) == [LOSS_TOGETHER]


def test_claims_fail_for_a_wrong_gradient_or_a_second_all_reduce(frameworks: dict[str, Cases]) -> None:
    ours, theirs = frameworks.values()
    alone = ours[cases.LOSS_ALONE]
    wrong = dataclasses.replace(alone, gradient=alone.gradient * 0.75)  # as of a mean of the replicas' means
    assert failing(ours | {cases.LOSS_ALONE: wrong}, theirs) == [SAME_LOSS, SAME]
    assert failing(ours, theirs, (1, 2)) == [AT_ONCE]


def test_jaxddp_sends_the_global_count_with_the_gradients(replicas: Replicas) -> None:
    assert in_jax.all_reduces_of_jaxddp(replicas, "global") == 1


def test_impossible_marks_are_refused() -> None:
    early = [(START, 0), (BACKWARD, 1), (ALL_REDUCE, 4)]
    late = [(START, 0), (BACKWARD, 5), (ALL_REDUCE, 6)]
    with pytest.raises(ValueError, match="left an all-reduce 1 ns before the last one arrived"):
        timeline([early, late])
    with pytest.raises(ValueError, match="argument"):
        timeline([early, late[:2]])


def test_both_frameworks_share_one_time_axis(frameworks: dict[str, Cases]) -> None:
    ours = frameworks["JAX"]
    figure = figure_of({"JAX": ours, "torch": {name: slowed(case, 3) for name, case in ours.items()}})
    figure.draw_without_rendering()
    limits = {axes.get_xlim() for axes in figure.axes}
    widths = [axes.get_window_extent().width for axes in figure.axes]
    assert len(limits) == 1 and max(widths) == pytest.approx(min(widths))
    longest = max(span.end for case in ours.values() for spans in case.step for span in spans) / 1e6
    assert limits.pop()[1] > 3 * longest  # milliseconds


def slowed(case: Measurement, factor: int) -> Measurement:
    steps = [
        [[Span(span.phase, factor * span.begin, factor * span.end) for span in spans] for spans in step]
        for step in case.steps
    ]
    return dataclasses.replace(case, steps=steps)


def test_trace_picture_and_table_are_written(frameworks: dict[str, Cases], replicas: Replicas) -> None:
    step = frameworks["torch"][cases.BATCH_NORM].step
    events = json.loads(trace.chrome_trace({"torch": step}))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [span["name"] for span in spans if span["tid"] == 1] == PHASES[cases.BATCH_NORM]
    assert sum(span["dur"] for span in spans) == pytest.approx(sum(s.end - s.begin for of in step for s in of) / 1e3)
    assert draw(frameworks)[:4] == b"\x89PNG"
    assert "waits" in table(frameworks["JAX"])
    assert 0 < in_jax.cost_of_a_mark(PLAN, replicas) < PAUSE
