"""Compare what the check reaches on its exams with what it must reach."""

import statistics
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.scoreboard.edited import EditedScore, differing
from benchmarks.scoreboard.outside import OutsideScore
from benchmarks.scoreboard.right import RightScore
from benchmarks.scoreboard.score import Score
from benchmarks.scoreboard.unseen import SMALL, UnseenScore
from benchmarks.tables import table

COLUMNS = "exam", "what", "floor", "measured"
SECONDS = 5.0  # of a search for causes in a loss, at the median
PAIR = "+"  # between the names of two faults
Row = tuple[str, str, str, str]


def floors(
    parts: Mapping[str, Sequence[Score]],
    outside: Sequence[OutsideScore] = (),
    agreements: Mapping[str, str] | None = None,
    right: Sequence[RightScore] = (),
    unseen: Sequence[UnseenScore] = (),
    edited: Sequence[EditedScore] = (),
    beside: Sequence[RightScore] = (),
) -> Iterator[str]:
    """Yield the blocks of the scoreboard's document; the floors are those of whole exams. See `document.to_markdown`.

    >>> [*floors({}, right=[RightScore("00_mlp/nnx", "equal", "", 4.0)])][1].splitlines()[-1]
    '| correct ports, written differently | alarms | 0 | 0 of 1 |'
    """
    rows = [
        *_of_planted(parts),
        *_of_outside(outside),
        *_of_alarms(parts, right, beside),
        *_of_threads(agreements or {}),
        *_of_unseen(unseen),
        *_of_edited(edited),
    ]
    if rows:
        yield "## Floors"
        yield table(COLUMNS, rows)


def _row(exam: str, what: str, floor: object, measured: int, total: int) -> Row:
    return exam, what, f"{floor}", f"{measured} of {total}"


def _of_planted(parts: Mapping[str, Sequence[Score]]) -> Iterator[Row]:
    if scores := parts.get("planted"):
        for what, floor in (("found", 600), ("named", 590), ("wrong", 0)):
            yield _row("planted faults", what, floor, sum(getattr(score, what) for score in scores), len(scores))


def _of_outside(scores: Sequence[OutsideScore]) -> Iterator[Row]:
    if scores:
        for what, floor in (("found", 125), ("named", 120), ("wrong", 0)):
            yield _row("users' ports", what, floor, sum(getattr(score, what) for score in scores), len(scores))
        yield _row("users' ports", "lines of both sides", 118, sum(all(score.lines) for score in scores), len(scores))


def _of_alarms(
    parts: Mapping[str, Sequence[Score]], right: Sequence[RightScore], beside: Sequence[RightScore]
) -> Iterator[Row]:
    for exam, scores in (("correct ports", parts.get("clean")), ("correct ports, written differently", right)):
        if scores:
            yield _row(exam, "alarms", 0, sum(score.verdict != "equal" for score in scores), len(scores))
    if beside:
        alone = sum(score.verdict == "alone" for score in beside)
        yield _row("correct ports with a fault", "found alone", "all", alone, len(beside))


def _of_threads(agreements: Mapping[str, str]) -> Iterator[Row]:
    for what, floor in (("same", 25), ("another", 0)) if agreements else ():
        yield _row("public threads", f"{what} cause", floor, [*agreements.values()].count(what), len(agreements))


def _of_unseen(unseen: Sequence[UnseenScore]) -> Iterator[Row]:
    singles = [score for score in unseen if PAIR not in score.label]
    pairs = [score for score in unseen if PAIR in score.label]
    for exam, scores, lines, named in (("unseen faults", singles, 55, 45), ("unseen pairs", pairs, 13, None)):
        if not scores:
            continue
        small = sum(score.largest <= SMALL for score in scores)
        yield _row(exam, f"segments of at most {SMALL} calls", "all", small, len(scores))
        both = sum(score.jax_line and score.torch_line for score in scores)
        yield _row(exam, "lines of both sides", lines, both, len(scores))
        if named is not None:
            yield _row(exam, "named", named, sum(score.named for score in scores), len(scores))
        yield _row(exam, "wrong", 0, sum(score.wrong for score in scores), len(scores))


def _of_edited(edited: Sequence[EditedScore]) -> Iterator[Row]:
    different = differing(edited)
    if not different:
        return
    counted = (
        ("the edited line", 95, sum(score.line for score in different)),
        (f"segments of at most {SMALL} calls", 95, sum(score.small for score in different)),
        ("named", 75, sum(score.named for score in different)),
        ("equal with the patch", 60, sum(score.patched for score in different)),
    )
    for what, share, count in counted:
        measured = f"{100 * count / len(different):.0f} %, {count} of {len(different)}"
        yield "mutants that differ", what, f"{share} %", measured
    of_losses = [score.seconds[1] for score in different if score.in_loss]
    if of_losses:
        seconds = f"{statistics.median(of_losses):.1f} s"
        yield "mutants whose loss differs", "search for causes, median", f"{SECONDS:g} s", seconds
