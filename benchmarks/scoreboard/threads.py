"""Public threads of tests/faults/threads: their ports, the verdicts of the check, and the page of both."""

import fnmatch
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.scoreboard.score import Question, Score
from benchmarks.tables import table
from jaxddp.files import write_atomically
from jaxddp.parity.environment import environment
from jaxddp.parity.port import PortFile

WORLD_SIZE = 2
VERDICTS = Path("tests/faults/threads/verdicts.json")
ABOUT = ("date", "hardware", "python", "jax", "flax", "optax", "torch")
COLUMNS = ("thread", "seen", "found there", "the check says", "cause")
NOT_RUN = {"verdict": "not run", "said": [], "words": []}
COMMAND = "python -m benchmarks.scoreboard --parts threads --threads-page docs/threads.md"
INTRODUCTION = """\
People ask in public why a program in JAX trains unlike one in PyTorch, or unlike itself on more devices. Here such
threads are re-enacted: each is a small port, written anew from what the thread describes, and beside what came of the
thread stands what the check says about the port (`python -m jaxddp.parity port.py`). No line is copied. The records are
in `tests/faults/threads`, whose `write_port` writes a port into a folder.

The last column compares the two causes. **Same**: the check names the thread's, or says equal where the question was
a mistake. **Another**: it names something else. **None**: it finds the difference and where it begins, and no cause;
or it sees no difference, where the fourth column says equal. **Open**: the thread has no known cause, and the port is
what it describes, or has a cause that is suspected. Residuals are relative, in float64: that of the difference, and
what is left of it with the cause planted in the PyTorch half."""

Groups = Mapping[str, Mapping[str, Any]]  # heading -> name -> tests.faults.threads.Thread


def questions(threads: Mapping[str, Any], write_port: Any, only: str, folder: Path) -> Iterator[Question]:
    """Write the ports of threads whose name matches a pattern, and yield their questions.

    Args:
        threads: name -> `tests.faults.threads.Thread`.
        write_port: (thread, folder) -> port file.
    """
    for name, thread in threads.items():
        if fnmatch.fnmatch(name, only):
            source = PortFile(str(write_port(thread, folder / name)), WORLD_SIZE)
            yield Question(source, name, thread.program, "", WORLD_SIZE, thread.steps, thread.accepted)


def verdict_of(score: Score) -> dict[str, Any]:
    """Return what `verdicts.json` keeps of a score."""
    problems = {"problems": list(score.problems)} if score.problems else {}
    return {"verdict": score.verdict, "said": [*map(list, score.said)], "words": [*score.words], **problems}


def agreement(thread: Any, score: Score) -> str:
    """Compare the check's answer with the thread's: "same", "another", "none" or "open"."""
    if thread.outcome == "open":
        return "open"
    if thread.outcome == "mistake":
        return "same" if score.verdict == "equal" else "another"
    return "same" if score.named else "another" if score.wrong else "none"


def score_from(name: str, thread: Any, verdict: Mapping[str, Any]) -> Score:
    """Return the score that a verdict was kept of, as far as `agreement` needs it."""
    question = Question(PortFile(""), name, thread.program, "", WORLD_SIZE, thread.steps, thread.accepted)
    said = tuple(map(tuple, verdict["said"]))
    problems = tuple(verdict.get("problems", ()))
    return Score(question, verdict["verdict"], said, (), None, 0.0, {}, problems, tuple(verdict["words"]))


def counts(agreements: Sequence[str]) -> str:
    """Count agreements in words.

    >>> counts(["same", "none", "open", "same"])
    'the same cause 2, another 0, none 1; open 1'
    """
    number = Counter(agreements)
    return f"the same cause {number['same']}, another {number['another']}, none {number['none']}; open {number['open']}"


def write(groups: Groups, scores: Sequence[Score], page: Path) -> None:
    """Keep the verdicts of the threads that were run, and write the page of all."""
    about = environment()
    kept = json.loads(VERDICTS.read_text())["threads"] if VERDICTS.exists() else {}
    kept |= {score.question.label: verdict_of(score) for score in scores}
    verdicts = {name: kept[name] for group in groups.values() for name in group if name in kept}
    fresh = {"about": {name: about[name] for name in ABOUT}, "threads": verdicts}
    write_atomically(VERDICTS, in_lines(fresh).encode())
    write_atomically(page, to_page(groups, fresh).encode())


def in_lines(kept: Mapping[str, Mapping[str, Any]]) -> str:
    """Format verdicts as JSON with a line for each thread.

    >>> print(in_lines({"about": {"date": "today"}, "threads": {"gelu": {"said": [["a"]]}}}), end="")
    {"about": {
     "date": "today"
    },
    "threads": {
     "gelu": {"said": [["a"]]}
    }}
    """
    parts = []
    for part, entries in kept.items():
        lines = (f" {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in entries.items())
        parts.append("\n".join((f"{json.dumps(part)}: {{", ",\n".join(lines), "}")))
    return "{" + ",\n".join(parts) + "}\n"


def to_page(groups: Groups, kept: Mapping[str, Any]) -> str:
    """Format the page.

    Args:
        kept: contents of `verdicts.json`; threads without a verdict are "not run".
    """
    agreements: list[str] = []
    sections: list[str] = []
    for heading, threads in groups.items():
        rows = []
        for name, thread in threads.items():
            score = score_from(name, thread, kept["threads"].get(name, NOT_RUN))
            agreements.append(agreement(thread, score))
            rows.append((_links(thread), thread.seen, _found(thread), _answer(score), agreements[-1]))
        sections += [f"## {heading}", table(COLUMNS, rows)]
    run = "{date}, {hardware}, Python {python}, jax {jax}, flax {flax}, optax {optax}, torch {torch}."
    count = f"{len(agreements)} threads: {counts(agreements)}. `{COMMAND}`, {run.format(**kept['about'])}"
    return "\n\n".join(["# Public threads", INTRODUCTION, count, *sections]) + "\n"


def _links(thread: Any) -> str:
    return ", ".join(
        f"[{address}](https://github.com/{address.replace('#', '/issues/')})" for address in thread.addresses
    )


def _found(thread: Any) -> str:
    return f"{thread.found} *Here: {thread.note}.*" if thread.note else thread.found


def _answer(score: Score) -> str:
    if score.problems:
        return "; ".join(score.problems)
    lines = [
        f"{words} `{'` or `'.join(names)}`" if names else words
        for words, names in zip(score.words, score.said, strict=True)
    ]
    return "; ".join(lines) or score.verdict
