"""Scoreboard as a Markdown document."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.scoreboard.mutants import Outcome
from benchmarks.scoreboard.score import Score

METHODS = {
    "rtol_1": "rtol = 1 on scalars, last of 10 steps",
    "means": "means of tensors, rtol 1e-7",
    "means_1e4": "means, atol 1e-4",
    "forward_1e5": "forward pass to 1e-5",
    "ten_percent": "10 % per tensor",
    "allclose": "allclose on the parameters",
}


def to_markdown(
    parts: Mapping[str, Sequence[Score]], mutants: Sequence[Outcome], environment: Mapping[str, str]
) -> str:
    """Format the scoreboard.

    Args:
        parts: "planted", "pairs", "uncatalogued" or "clean" -> scores, for the parts that were run.
        mutants: outcomes of the mutants of the project.
        environment: command, date, hardware and versions.
    """
    lines = ["# Scoreboard of the parity check", ""]
    lines += [
        f"`{environment['command']}`, {environment['date']}, {environment['hardware']}, Python "
        f"{environment['python']}, jax {environment['jax']}, flax {environment['flax']}, "
        f"optax {environment['optax']}, torch {environment['torch']}.",
        "",
    ]
    lines += [*_summary(parts, mutants), ""]
    for name, section in (("planted", _planted), ("pairs", _pairs), ("uncatalogued", _uncatalogued), ("clean", _clean)):
        if parts.get(name):
            lines += [*section(parts[name]), ""]
    if mutants:
        lines += [*_mutants(mutants), ""]
    return "\n".join(lines)


def _summary(parts: Mapping[str, Sequence[Score]], mutants: Sequence[Outcome]) -> Iterator[str]:
    yield "| what | number | result |"
    yield "|---|---|---|"
    if scores := parts.get("planted"):
        faults = _by_fault(scores)
        named = [fault for fault, of in faults.items() if all(score.named for score in of)]
        quick = [fault for fault in named if max(score.steps or 99 for score in faults[fault]) <= 5]
        yield f"| ports with one of {len(faults)} faults planted | {len(scores)} | {_counts(scores)} |"
        yield (
            f"| faults named in all of their ports | {len(faults)} | {len(named)}, "
            f"{len(quick)} of them within 5 steps from the first that shows them |"
        )
    if scores := parts.get("pairs"):
        yield f"| pairs of faults | {len(scores)} | {_counts(scores)} |"
    if scores := parts.get("uncatalogued"):
        count = len(_by_fault(scores))
        yield f"| ports with one of {count} faults outside the catalogue | {len(scores)} | {_counts(scores)} |"
    if scores := parts.get("clean"):
        alarms = sum(score.verdict != "equal" for score in scores)
        yield f"| correct ports, {scores[0].question.steps} steps each | {len(scores)} | {alarms} false alarms |"
    if mutants:
        yield f"| mutants of jaxddp itself | {len(mutants)} | {sum(o.killed for o in mutants)} killed by its tests |"


def _counts(scores: Sequence[Score]) -> str:
    found, named, wrong = (sum(getattr(score, name) for score in scores) for name in ("found", "named", "wrong"))
    return f"{found} found, {named} named, {wrong} named wrongly"


def _planted(scores: Sequence[Score]) -> Iterator[str]:
    yield "## Faults"
    yield ""
    yield (
        '"steps" is the number of steps, from the first that shows the fault, after which it is named, in the worst '
        "of its ports. The last columns count the ports in which other thresholds would have raised an alarm, on the "
        "same float64 traces."
    )
    yield ""
    columns = ("fault", "ports", "found", "named", "SGD", "Adam", "steps", "other names given", *METHODS.values())
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for fault, of in _by_fault(scores).items():
        steps = max((score.steps for score in of if score.steps is not None), default=None)
        others = " | ".join(f"{sum(score.others.get(method, False) for score in of)}" for method in METHODS)
        families = " | ".join(_named_of(of, family) for family in ("SGD", "Adam"))
        also = ", ".join(sorted({n for s in of for names in s.said for n in names} - {fault}))
        found, named = sum(score.found for score in of), sum(score.named for score in of)
        yield f"| {fault} | {len(of)} | {found} | {named} | {families} | {steps or '-'} | {also or '-'} | {others} |"
    yield ""
    total = len(scores)
    yield f"Alarms in all {total} ports: this check {sum(s.found for s in scores)}; {_alarms(scores)}."
    yield ""
    yield from _misses([score for score in scores if not score.named])


def _named_of(scores: Sequence[Score], family: str) -> str:
    of = [score for score in scores if score.question.family == family]
    return f"{sum(score.named for score in of)}/{len(of)}" if of else "-"


def _misses(scores: Sequence[Score]) -> Iterator[str]:
    if not scores:
        yield "Every fault was named in each of its ports."
        return
    yield "Not named:"
    yield ""
    for score in scores:
        yield f"- {_title(score)}: {_said(score)}"


def _pairs(scores: Sequence[Score]) -> Iterator[str]:
    yield "## Pairs"
    yield ""
    yield "| pair | scenario | names given | steps |"
    yield "|---|---|---|---|"
    for score in scores:
        q = score.question
        mark = "" if score.named else "**" if score.wrong else "*"
        scenario = f"{q.scenario} {q.optimizer} x{q.world_size}"
        yield f"| {q.label} | {scenario} | {mark}{_said(score)}{mark} | {score.steps or '-'} |"


def _uncatalogued(scores: Sequence[Score]) -> Iterator[str]:
    yield "## Faults outside the catalogue"
    yield ""
    yield "These must be found and located, but not named."
    yield ""
    yield "| fault | scenario | verdict | where (stage, step, tensor, layer) | names given |"
    yield "|---|---|---|---|---|"
    for score in scores:
        where = "; ".join(" ".join(filter(None, map(str, place))) for place in score.where)
        names = ", ".join(name for names in score.said for name in names) or "none"
        q = score.question
        yield f"| {q.label} | {q.scenario} {q.optimizer} | {score.verdict} | {where} | {names} |"


def _clean(scores: Sequence[Score]) -> Iterator[str]:
    yield "## Correct ports"
    yield ""
    by_kind = Counter(f"{score.question.scenario} {score.question.optimizer}" for score in scores)
    false = [score for score in scores if score.verdict != "equal"]
    yield f"{', '.join(f'{kind} ({number} seeds)' for kind, number in by_kind.items())}: {len(false)} false alarms."
    for score in false:
        yield f"- {_title(score)}: {_said(score)} {score.where} {'; '.join(score.problems)}"
    yield f"False alarms of other thresholds on the same traces: {_alarms(scores)}."


def _alarms(scores: Sequence[Score]) -> str:
    return "; ".join(f"{label} {sum(s.others.get(method, False) for s in scores)}" for method, label in METHODS.items())


def _mutants(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield "## Mutants of jaxddp"
    yield ""
    yield "| mutant | killed by |"
    yield "|---|---|"
    for outcome in outcomes:
        yield f"| {outcome.name} | {outcome.by if outcome.killed else '**survives**'} |"


def _title(score: Score) -> str:
    q = score.question
    return f"{q.label} in {q.scenario} {q.optimizer} x{q.world_size}"


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
