"""Public threads of tests/faults/threads: their ports, the verdicts of the check, and the page of both."""

import fnmatch
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.scoreboard.score import Question, Score, in_words, score_of
from benchmarks.tables import table
from jaxddp.files import write_atomically
from jaxddp.parity import compare_runs
from jaxddp.parity.checking import check
from jaxddp.parity.coverage import ASPECTS
from jaxddp.parity.environment import environment
from jaxddp.parity.port import PortFile
from jaxddp.parity.report.coverage_words import beyond_lines, without_effect_line
from jaxddp.parity.report.report import Report
from jaxddp.parity.workers import Workers

WORLD_SIZE = 2
VERDICTS = Path("tests/faults/threads/verdicts.json")
ABOUT = ("date", "hardware", "python", "jax", "flax", "optax", "torch")
COLUMNS = ("thread", "seen", "found there", "the check says", "cause")
RECORD = "record.py"  # the file of a thread whose two loops are recorded
NOT_RUN = {"verdict": "not run", "said": [], "words": []}
COMMAND = "python -m benchmarks.scoreboard --parts threads --threads-page docs/threads.md"
INTRODUCTION = """\
People ask in public why a program in JAX trains differently from one in PyTorch, or differently on more devices. This
page re-enacts such threads. Each is a small port, written from the thread's description without copying a line. The
table shows the thread's outcome next to what `jaxddp check port.py` says about the port. The records are in
`tests/faults/threads`, whose `write_port` writes a port into a folder.

The last column compares the two causes. **Same**: the check states the thread's cause, or says equal if the question
was a mistake. **Another**: it states another cause. **None**: it finds the difference and where it begins, but no
cause, or it sees no difference and the fourth column says equal. **Open**: the thread has no known cause, and the
port is what it describes, or has a suspected cause. Residuals are relative, in float64: the difference, and what is
left of it with the cause planted in the PyTorch half.

If no step of the run shows a cause, another part of the report does: the rows on types, rates, initial weights and
evaluation, a line on what differs beyond the run, or a remark. The fourth column then has that sentence. In the
threads of the groups "silent" nothing failed or warned. Threads about the precision of products on a certain GPU or
compiler are left out (google-deepmind/mujoco_playground#86, jax-ml/jax#14022), since a check in float64 cannot show
them."""

Groups = Mapping[str, Mapping[str, Any]]  # heading -> name -> tests.faults.threads.Thread


def questions(threads: Mapping[str, Any], write_port: Any, only: str, folder: Path) -> Iterator[Question]:
    """Write the ports of threads whose name matches a pattern, and yield their questions.

    Args:
        threads: name -> `tests.faults.threads.Thread`.
        write_port: (thread, folder) -> program.
    """
    for name, thread in threads.items():
        if fnmatch.fnmatch(name, only):
            source = PortFile(str(write_port(thread, folder / name)), WORLD_SIZE)
            yield Question(source, name, thread.program, "", WORLD_SIZE, thread.steps, thread.accepted)


def score_whole(question: Question, workers: Workers) -> Score:
    """Check a port as a user does, rates and initialisation with it, and keep the sentences of the report.

    Two loops are recorded in place of a port, and compared.
    """
    started, path = time.monotonic(), Path(question.source.name)
    if path.name == RECORD:
        subprocess.run([sys.executable, path.name], cwd=path.parent, env=_importing(), check=True, capture_output=True)
        report = compare_runs(path.parent / "torch_run", path.parent / "jax_run")
    else:
        report = check(question.source, world_size=question.world_size, steps=question.steps, workers=workers)
    return replace(score_of(question, report, time.monotonic() - started), says=tuple(_sentences(report)))


def _importing() -> dict[str, str]:
    """Return the environment of a process that finds this project in any folder."""
    paths = f"{Path.cwd()}", os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _sentences(report: Report) -> Iterator[tuple[str, str]]:
    """Yield each sentence of a report after its place; see `tests.faults.threads.Thread.answer`."""
    for difference in report.differences:
        place = difference.stage if difference.stage in ASPECTS else "cause"
        yield place, "; ".join(filter(None, [in_words(difference), difference.detail]))
    for place, aspect in report.aspects.items():
        yield from ((place, sentence) for sentence in aspect.says)
    yield from (("beyond", line) for line in beyond_lines(report))
    yield from (("remark", line) for line in (*report.idle, *map(without_effect_line, report.without_effect)))


def verdict_of(thread: Any, score: Score) -> dict[str, Any]:
    """Return what `verdicts.json` keeps of a score."""
    problems = {"problems": list(score.problems)} if score.problems else {}
    says = [sentence for place, sentence in score.says if thread.words and place == thread.answer]
    kept = {"verdict": score.verdict, "said": [*map(list, score.said)], "words": [*score.words]}
    return {**kept, **({"says": says} if says else {}), **problems}


def stated(thread: Any, score: Score) -> str:
    """Return the sentence that has a thread's words, at the place where they are expected; "": there is none."""
    sentences = (sentence for place, sentence in score.says if place == thread.answer)
    return next((says for says in sentences if thread.words and all(word in says for word in thread.words)), "")


def agreement(thread: Any, score: Score) -> str:
    """Compare the check's answer with the thread's: "same", "another", "none" or "open".

    What both sides compute at a place is no cause; it is the same if it has the thread's words.
    """
    if thread.outcome == "open":
        return "open"
    if thread.outcome == "mistake":
        return "same" if score.verdict == "equal" else "another"
    if score.named or stated(thread, score):
        return "same"
    return "another" if score.wrong else "none"


def score_from(name: str, thread: Any, verdict: Mapping[str, Any]) -> Score:
    """Return the score that a verdict was kept of, as far as `agreement` needs it."""
    question = Question(PortFile(""), name, thread.program, "", WORLD_SIZE, thread.steps, thread.accepted)
    said = tuple(map(tuple, verdict["said"]))
    problems = tuple(verdict.get("problems", ()))
    says = tuple((thread.answer, sentence) for sentence in verdict.get("says", ()))
    return Score(question, verdict["verdict"], said, (), None, 0.0, {}, problems, tuple(verdict["words"]), says)


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
    threads = {name: thread for group in groups.values() for name, thread in group.items()}
    kept |= {score.question.label: verdict_of(threads[score.question.label], score) for score in scores}
    verdicts = {name: kept[name] for name in threads if name in kept}
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
            rows.append((_links(thread), thread.seen, _found(thread), _answer(thread, score), agreements[-1]))
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


def _answer(thread: Any, score: Score) -> str:
    if score.problems:
        return "; ".join(score.problems)
    if says := stated(thread, score) or ("" if score.words else next((says for _, says in score.says), "")):
        place = "" if thread.answer in ("cause", "beyond") else f"{thread.answer}: "
        return f"{'equal; ' if score.verdict == 'equal' else ''}{place}{says}"
    lines = [
        f"{words} `{'` or `'.join(names)}`" if names else words
        for words, names in zip(score.words, score.said, strict=True)
    ]
    return "; ".join(lines) or score.verdict
