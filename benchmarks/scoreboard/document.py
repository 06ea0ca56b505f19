"""Scoreboard as a Markdown document."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.scoreboard.edited import EditedScore
from benchmarks.scoreboard.edited import counts as counts_edited
from benchmarks.scoreboard.edited import section as edited_section
from benchmarks.scoreboard.exam import ExamScore
from benchmarks.scoreboard.exam import counts as counts_exam
from benchmarks.scoreboard.exam import section as exam_section
from benchmarks.scoreboard.floors import floors
from benchmarks.scoreboard.mutants import Outcome
from benchmarks.scoreboard.outside import OutsideScore, counts_of_patches
from benchmarks.scoreboard.outside import counts as counts_outside
from benchmarks.scoreboard.right import RightScore, counts_beside, section_beside
from benchmarks.scoreboard.right import counts as counts_right
from benchmarks.scoreboard.right import section as right_section
from benchmarks.scoreboard.score import Score
from benchmarks.scoreboard.threads import counts as counts_threads
from benchmarks.scoreboard.unseen import UnseenScore
from benchmarks.scoreboard.unseen import counts as counts_unseen
from benchmarks.scoreboard.unseen import section as unseen_section
from benchmarks.tables import table

METHODS = {
    "rtol_1": "rtol = 1 on scalars, last of 10 steps",
    "means": "means of tensors, rtol 1e-7",
    "means_1e4": "means, atol 1e-4",
    "forward_1e5": "forward pass to 1e-5",
    "ten_percent": "10 % per tensor",
    "allclose": "allclose on the parameters",
}


def to_markdown(
    parts: Mapping[str, Sequence[Score]],
    outside: Sequence[OutsideScore],
    mutants: Sequence[Outcome],
    environment: Mapping[str, str],
    agreements: Mapping[str, str],
    exam: Sequence[ExamScore] = (),
    right: Sequence[RightScore] = (),
    unseen: Sequence[UnseenScore] = (),
    edited: Sequence[EditedScore] = (),
    beside: Sequence[RightScore] = (),
) -> str:
    """Format the scoreboard.

    Args:
        parts: "planted", "pairs", "uncatalogued", "clean" or "threads" -> scores, for the parts that were run.
        outside: scores of the part "outside".
        mutants: outcomes of the mutants of the project.
        environment: command, date, hardware and versions.
        agreements: public thread -> how far the check agrees with it.
        exam: scores of the part "exam".
        right: scores of the part "right".
        unseen: scores of the part "unseen".
        edited: scores of the part "edited".
        beside: scores of the part "beside".
    """
    blocks = [
        "# Scoreboard of the parity check",
        f"`{environment['command']}`, {environment['date']}, {environment['hardware']}, Python "
        f"{environment['python']}, jax {environment['jax']}, flax {environment['flax']}, "
        f"optax {environment['optax']}, torch {environment['torch']}.",
        table(
            ["what", "number", "result"],
            _summary(parts, outside, mutants, agreements, exam, right, unseen, edited, beside),
        ),
    ]
    blocks += floors(parts, outside, agreements, right, unseen, edited, beside)
    for name, section in (("planted", _planted), ("pairs", _pairs), ("uncatalogued", _uncatalogued), ("clean", _clean)):
        if parts.get(name):
            blocks += section(parts[name])
    blocks += right_section(right) if right else ()
    blocks += section_beside(beside) if beside else ()
    if outside:
        blocks += _outside(outside)
    blocks += unseen_section(unseen) if unseen else ()
    if agreements:
        rows = [(s.question.label, _scenario(s), _said(s), agreements[s.question.label]) for s in parts["threads"]]
        blocks += [
            "## Public threads",
            "See [the page](threads.md).",
            table(("thread", "port", "names", "cause"), rows),
        ]
    blocks += exam_section(exam) if exam else ()
    blocks += edited_section(edited) if edited else ()
    if mutants:
        outcomes = ([outcome.name, outcome.by if outcome.killed else "**survives**"] for outcome in mutants)
        blocks += ["## Mutants of jaxddp", table(["mutant", "killed by"], outcomes)]
    return "\n\n".join(blocks) + "\n"


def _summary(
    parts: Mapping[str, Sequence[Score]],
    outside: Sequence[OutsideScore],
    mutants: Sequence[Outcome],
    agreements: Mapping[str, str],
    exam: Sequence[ExamScore],
    right: Sequence[RightScore],
    unseen: Sequence[UnseenScore],
    edited: Sequence[EditedScore],
    beside: Sequence[RightScore],
) -> Iterator[Sequence[object]]:
    if scores := parts.get("planted"):
        faults = _by_fault(scores)
        named = [fault for fault, of in faults.items() if all(score.named for score in of)]
        quick = [fault for fault in named if max(score.steps or 99 for score in faults[fault]) <= 5]
        within = f"{len(quick)} of them within 5 steps from the first that shows them"
        yield f"ports with one of {len(faults)} faults planted", len(scores), _counts(scores)
        yield "faults named in all of their ports", len(faults), f"{len(named)}, {within}"
    if scores := parts.get("pairs"):
        yield "pairs of faults", len(scores), _counts(scores)
    if scores := parts.get("uncatalogued"):
        kinds = len(_by_fault(scores))
        yield f"ports with one of {kinds} faults outside the catalogue", len(scores), _counts(scores)
    if outside:
        ports = len({score.fault.port for score in outside})
        yield f"faults outside the catalogue in {ports} users' ports", len(outside), counts_outside(outside)
        patchable = sum(score.patchable for score in outside)
        yield "of these, named ones of model, loss, optimizer and schedule", patchable, counts_of_patches(outside)
    if unseen:
        yield "ports by an author who does not know the check", len(unseen), counts_unseen(unseen)
    if scores := parts.get("clean"):
        alarms = sum(score.verdict != "equal" for score in scores)
        yield f"correct ports, {scores[0].question.steps} steps each", len(scores), f"{alarms} false alarms"
    if right:
        yield "correct ports whose halves are written differently", len(right), counts_right(right)
    if beside:
        yield "of these, with a fault beside what is written differently", len(beside), counts_beside(beside)
    if agreements:
        yield "public threads, re-enacted", len(agreements), counts_threads([*agreements.values()])
    if exam:
        yield "mutants of correct ports", len(exam), counts_exam(exam)
    if edited:
        yield "mutants that are not of the exam, with causes", len(edited), counts_edited(edited)
    if mutants:
        yield "mutants of jaxddp itself", len(mutants), f"{sum(o.killed for o in mutants)} killed by its tests"


def _counts(scores: Sequence[Score]) -> str:
    found, named, wrong = (sum(getattr(score, name) for score in scores) for name in ("found", "named", "wrong"))
    return f"{found} found, {named} named, {wrong} named wrongly"


def _planted(scores: Sequence[Score]) -> Iterator[str]:
    yield "## Faults"
    yield (
        '"steps" is the number of steps, from the first that shows the fault, after which it is named, in the worst '
        "of its ports. The last columns count the ports in which other thresholds would have raised an alarm, on the "
        "same float64 traces."
    )
    columns = ("fault", "ports", "found", "named", "SGD", "Adam", "steps", "other names given", *METHODS.values())
    yield table(columns, (_fault_row(fault, of) for fault, of in _by_fault(scores).items()))
    yield f"Alarms in all {len(scores)} ports: this check {sum(s.found for s in scores)}; {_alarms(scores)}."
    missed = [score for score in scores if not score.named]
    if missed:
        yield "Not named:"
        yield "\n".join(f"- {_title(score)}: {_said(score)}" for score in missed)
    else:
        yield "Every fault was named in each of its ports."


def _fault_row(fault: str, of: Sequence[Score]) -> Iterator[object]:
    yield fault
    yield len(of)
    yield sum(score.found for score in of)
    yield sum(score.named for score in of)
    yield _named_of(of, "SGD")
    yield _named_of(of, "Adam")
    yield max((score.steps for score in of if score.steps is not None), default=None) or "-"
    yield ", ".join(sorted({name for score in of for names in score.said for name in names} - {fault})) or "-"
    yield from (sum(score.others.get(method, False) for score in of) for method in METHODS)


def _named_of(scores: Sequence[Score], family: str) -> str:
    of = [score for score in scores if score.question.family == family]
    return f"{sum(score.named for score in of)}/{len(of)}" if of else "-"


def _pairs(scores: Sequence[Score]) -> Iterator[str]:
    rows = []
    for score in scores:
        mark = "" if score.named else "**" if score.wrong else "*"
        rows.append([score.question.label, _scenario(score), f"{mark}{_said(score)}{mark}", score.steps or "-"])
    yield "## Pairs"
    yield table(["pair", "scenario", "names given", "steps"], rows)


def _uncatalogued(scores: Sequence[Score]) -> Iterator[str]:
    rows = []
    for score in scores:
        where = "; ".join(" ".join(filter(None, map(str, place))) for place in score.where)
        names = ", ".join(name for names in score.said for name in names) or "none"
        q = score.question
        rows.append([q.label, f"{q.scenario} {q.optimizer}", score.verdict, where, names])
    yield "## Faults outside the catalogue"
    yield "These must be found and located. Those that an edit of torch's calls explains have its words for a name."
    yield table(["fault", "scenario", "verdict", "where (stage, step, tensor, layer)", "names given"], rows)


def _clean(scores: Sequence[Score]) -> Iterator[str]:
    by_kind = Counter(f"{score.question.scenario} {score.question.optimizer}" for score in scores)
    false = [score for score in scores if score.verdict != "equal"]
    kinds = ", ".join(f"{kind} ({number} seeds)" for kind, number in by_kind.items())
    yield "## Correct ports"
    yield "\n".join(
        [
            f"{kinds}: {len(false)} false alarms.",
            *(f"- {_title(score)}: {_said(score)} {score.where} {'; '.join(score.problems)}" for score in false),
            f"False alarms of other thresholds on the same traces: {_alarms(scores)}.",
        ]
    )


def _outside(scores: Sequence[OutsideScore]) -> Iterator[str]:
    rows = []
    for score in scores:
        fault, places = score.fault, "; ".join(map(str, score.places))
        said = "; ".join(filter(None, score.said)) or "; ".join(score.problems) or "-"
        named = "yes" if score.named else "**wrong**" if score.wrong else "no"
        lines = " and ".join(side for side, found in zip(("jax", "torch"), score.lines, strict=True) if found) or "-"
        expected = f"{fault.ours}; the reference: {fault.reference}"
        located = "yes" if score.located else "between layers" if score.near else "no"
        patched = "yes" if score.patched else "no" if score.patches else "-"
        known = f" ({fault.known})" if fault.known else ""
        rows.append(
            [
                f"{score.label}{known}",
                fault.kind,
                expected,
                places or score.verdict,
                named,
                located,
                lines,
                patched,
                said,
            ]
        )
    yield "## Faults outside the catalogue, in user-style ports"
    yield (
        "In brackets: the catalogue has a fault that says the same. Located: named, or a difference is in the layer, "
        "tensor or call of the fault. Lines: of which files the report has the line. Patched: an edit of the JAX file, "
        "which the check itself proposes, makes both sides equal."
    )
    yield table(
        [
            "fault",
            "kind",
            "planted",
            "where (stage, step, tensor, layer)",
            "named",
            "located",
            "lines",
            "patched",
            "says",
        ],
        rows,
    )


def _alarms(scores: Sequence[Score]) -> str:
    return "; ".join(f"{label} {sum(s.others.get(method, False) for s in scores)}" for method, label in METHODS.items())


def _title(score: Score) -> str:
    return f"{score.question.label} in {_scenario(score)}"


def _scenario(score: Score) -> str:
    q = score.question
    return f"{q.port} x{q.world_size}"


def _said(score: Score) -> str:
    if score.problems:
        return "; ".join(score.problems)
    said = [
        " or ".join(names) or f"unexplained ({where[0]}, step {where[1]}, {where[2]})"
        for names, where in zip(score.said, score.where, strict=True)
    ]
    return "; ".join(said) or "no difference"


def _by_fault(scores: Iterable[Score]) -> dict[str, list[Score]]:
    by_fault: dict[str, list[Score]] = defaultdict(list)
    for score in scores:
        by_fault[score.question.label.partition("/")[0]].append(score)
    return dict(by_fault)
