"""Schedules of short programs, and their timelines, against times counted by hand."""

import pytest

from jaxddp.plan.costs import Cost
from jaxddp.plan.hlo import parse
from jaxddp.plan.timeline import Timeline, events, play

KERNEL, MB = 4e6, 1e6  # bytes that a `copy` below moves, and sends
OVERLAPPED = """
ENTRY %main (p: f32[500000]) -> f32[500000] {
  %p = f32[500000]{0} parameter(0)
  %a = f32[500000]{0} copy(%p)
  %start.1 = f32[500000]{0} all-reduce-start(%a), channel_id=1, replica_groups={{0,1}}, to_apply=%add
  %b = f32[500000]{0} copy(%p)
  %c = f32[500000]{0} copy(%b)
  %done.1 = f32[500000]{0} all-reduce-done(%start.1)
  %start.2 = f32[500000]{0} all-reduce-start(%c), channel_id=2, replica_groups={{0,1}}, to_apply=%add
  %d = f32[500000]{0} copy(%done.1)
  ROOT %done.2 = f32[500000]{0} all-reduce-done(%start.2)
}
"""


def timeline(text: str, message: float) -> Timeline:
    """Return the timeline with kernels of 1 second each and messages of `message` seconds."""
    return play(events(parse(text)), lambda cost: cost.bytes / KERNEL, lambda kind, size: message * size / (2 * MB))


def test_kernels_between_start_and_done_cover_a_message() -> None:
    found = timeline(OVERLAPPED, 1.5)
    assert [(one.covered, one.exposed) for one in found.sent] == [(1.5, 0), (1, 0.5)]
    assert (found.work, found.waiting, found.seconds) == (4, 0.5, 4.5)
    assert found.efficiency == pytest.approx(4 / 4.5) and found.bubble == pytest.approx(0.5 / 4.5)
    assert found.covered_share == pytest.approx((1 + 1 / 1.5) / 2)
    assert [one.work.bytes for one in found.sent] == [2 * KERNEL, KERNEL]


def test_a_message_waits_for_the_one_before_it() -> None:
    text = OVERLAPPED.replace("  %done.1 = f32[500000]{0} all-reduce-done(%start.1)\n", "").replace("%done.1", "%b")
    text = text.replace("  ROOT", "  %done.1 = f32[500000]{0} all-reduce-done(%start.1)\n  ROOT")
    found = timeline(text, 3.0)  # starts at 1 and 3, ends at 4 and 7; the kernels end at 4
    assert found.seconds == 7 and [one.exposed for one in found.sent] == [0, 3]


@pytest.mark.parametrize(
    ("fault", "replacement"),
    [
        ("  %b = f32[500000]{0} copy(%p)\n  %c = f32[500000]{0} copy(%b)\n  %done.1", "  %done.1"),
        ("all-reduce-done(%start.1)", "copy(%p)"),
    ],
)
def test_planted_faults_change_what_is_covered(fault: str, replacement: str) -> None:
    """Planted: nothing between start and done; a message that is never waited for."""
    assert fault in OVERLAPPED
    text = OVERLAPPED.replace(fault, replacement).replace("(%c)", "(%p)")
    assert timeline(text, 1.5).covered_share != pytest.approx(timeline(OVERLAPPED, 1.5).covered_share)


def test_a_synchronous_message_is_exposed() -> None:
    text = OVERLAPPED.replace("all-reduce-start(%a)", "all-reduce(%a)").replace("all-reduce-done(%start.1)", "copy(%b)")
    found = timeline(text, 1.5)
    assert found.sent[0].exposed == 1.5 and found.sent[0].message.kind == "all-reduce"


LOOP = """
%body (p: f32[500000]) -> f32[500000] {
  %p = f32[500000]{0} parameter(0)
  %start = f32[500000]{0} all-reduce-start(%p), channel_id=1, replica_groups={{0,1}}, to_apply=%add
  %a = f32[500000]{0} copy(%p)
  ROOT %done = f32[500000]{0} all-reduce-done(%start)
}

ENTRY %main (x: f32[500000]) -> f32[500000] {
  %x = f32[500000]{0} parameter(0)
  ROOT %loop = f32[500000]{0} while(%x), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_loops_are_unrolled() -> None:
    found = timeline(LOOP, 2.0)
    assert (len(found.sent), found.work, found.waiting) == (3, 3, 3)
    with pytest.raises(ValueError, match="unknown length"):
        timeline(LOOP.replace("known_trip_count", "guess"), 2.0)


def test_gathered_and_scattered_arrays_count_in_full() -> None:
    text = OVERLAPPED.replace("= f32[500000]{0} all-reduce-start(%a)", "= f32[4000000]{0} all-gather-start(%a)")
    text = text.replace("all-reduce-done(%start.1)", "all-gather-done(%start.1)")
    first = timeline(text, 1.0).sent[0].message
    assert (first.kind, first.bytes) == ("all-gather", 16_000_000)


def test_without_messages_nothing_waits() -> None:
    found = play([], lambda cost: 1.0, lambda kind, size: 1.0)
    assert found.waiting == 0 and found.covered_share == 1.0
    assert sum([Cost(bytes=1), Cost(bytes=2)], Cost()).bytes == 3
