"""`python -m benchmarks.scoreboard`: score the parity check on planted faults, correct ports, threads and mutants."""

import fnmatch
import importlib
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.scoreboard import threads
from benchmarks.scoreboard.document import to_markdown
from benchmarks.scoreboard.edited import EditedScore, score_edited
from benchmarks.scoreboard.exam import ExamScore, exam_module, examine, silent_list
from benchmarks.scoreboard.kept import Kept
from benchmarks.scoreboard.mutants import Outcome, run_mutants
from benchmarks.scoreboard.outside import OutsideScore, fault_module, score_outside
from benchmarks.scoreboard.right import WORLD_SIZE, RightScore, right_module, score_beside, score_right
from benchmarks.scoreboard.score import Question, Score, score
from benchmarks.scoreboard.unseen import UnseenScore, questions, score_unseen
from benchmarks.smoke import compile_faster
from jaxddp import cli
from jaxddp.errors import InputError, check_name
from jaxddp.files import check_files, write_atomically
from jaxddp.parity.environment import environment
from jaxddp.parity.workers import Workers

PROG = "python -m benchmarks.scoreboard"
OF_QUESTIONS = ("planted", "pairs", "uncatalogued", "clean", "threads")
APART = ("outside", "unseen", "right", "beside", "exam", "edited", "mutants")  # parts with scores of their own
PARTS = (*OF_QUESTIONS, *APART)
# Scenarios and optimizers of the correct ports, in turn.
CLEAN = (
    *(("mlp", "sgd"), ("mlp", "adamw"), ("tokens", "adamw"), ("convnet", "sgd"), ("mlp_accumulated", "sgd_nesterov")),
    *(("tokens_global", "sgd"), ("mlp_groups", "adam"), ("mlp", "rmsprop"), ("convnet", "adamw"), ("mlp", "adagrad")),
)


@dataclass(frozen=True)
class ScoreboardOptions:
    """Count how many planted faults the parity check finds and names. Run it from the root of the repository.

    The faults are in tests/faults, which shares no code with the diagnosis.
    """

    parts: tuple[str, ...] = PARTS
    """planted | pairs | uncatalogued | clean | threads | outside | unseen | right | beside | exam | edited |
    mutants."""
    only: str = "*"
    """Run only the faults, pairs, correct ports ("seed 7"), threads and mutants whose name matches this pattern."""
    share: float = 1.0
    """Share of the exam's mutants to run; always the same ones."""
    edited_ports: int = 120
    """Number of mutants that are not of the exam, and whose causes are sought; a third to a half of them differ."""
    clean_seeds: int = 100
    """Number of correct ports to check for false alarms."""
    clean_steps: int = 300
    """Number of steps of each correct port."""
    scores: Path | None = None
    """Append every result to this file; results that are in it already are not run again."""
    output: Path | None = None
    """Write the scoreboard to this Markdown file."""
    threads_page: Path | None = None
    """Write the page of the public threads to this Markdown file, and the verdicts to tests/faults/threads."""
    silent: Path | None = None
    """Write the names of the exam's silent mutants to this file; it takes the whole exam."""

    def __post_init__(self) -> None:
        for part in self.parts:
            check_name("--parts", part, PARTS)
        for name in ("clean_seeds", "clean_steps", "edited_ports"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        if not 0 < self.share <= 1:
            raise InputError(f"--share {self.share:g}: must be above 0 and at most 1")
        if self.silent is not None and (self.share < 1 or self.only != "*" or "exam" not in self.parts):
            raise InputError("--silent: needs the whole exam; leave out --only and --share, and let --parts have exam")
        marks = {
            "output": b"# Scoreboard of the parity check",
            "threads_page": b"# Public threads",
            "silent": b"# Silent mutants",
            "scores": rb'\{"key": ',
        }
        check_files({f"--{name.replace('_', '-')}": (getattr(self, name), mark) for name, mark in marks.items()})


def main(options: ScoreboardOptions, argv: Sequence[str]) -> None:
    """Run the parts, print a line for each port, and write the scoreboard."""
    faults, kept = _faults("planted"), Kept(options.scores)
    scores: dict[str, list[Score]] = {}
    with Workers(4, "cpu") as workers, tempfile.TemporaryDirectory() as folder:
        for part in (part for part in OF_QUESTIONS if part in options.parts):
            scores[part] = []
            for question in _questions(part, faults, options, Path(folder)):
                key = (part, *map(str, (question.label, question.scenario, question.optimizer)))
                key += (str(question.world_size), str(question.steps))
                if (result := kept.score(key, question)) is None:
                    # A correct port must not be reported as different in rounding either, nor beyond its run.
                    of_part = partial(score, count_steps=part in ("planted", "pairs"), correct=part == "clean")
                    result = (threads.score_whole if part == "threads" else of_part)(question, workers)
                    kept.add(key, result)
                    print(_line(result, *_agreements([result] * (part == "threads")).values()), flush=True)
                scores[part].append(result)
        outside = list(_outside(options, kept, workers)) if "outside" in options.parts else []
        unseen = list(_unseen(options, kept, workers)) if "unseen" in options.parts else []
    right = list(_right("right", options, kept)) if "right" in options.parts else []
    beside = list(_right("beside", options, kept)) if "beside" in options.parts else []
    exam = list(_exam(options, kept)) if "exam" in options.parts else []
    edited = list(_edited(options, kept)) if "edited" in options.parts else []
    outcomes = list(_mutants(options, kept)) if "mutants" in options.parts else []
    if not any((outcomes, outside, unseen, right, beside, exam, edited, *scores.values())):
        raise InputError(f"--only {options.only}: matches nothing in {', '.join(options.parts)}")
    command = shlex.join([*PROG.split(), *argv])
    about = {**environment(), "command": command, "date": kept.when()}
    agreements = _agreements(scores.get("threads", ()))
    if options.threads_page is not None:
        threads.write(_faults("threads").GROUPS, scores.get("threads", ()), options.threads_page)
    if options.silent is not None:
        write_atomically(options.silent, silent_list(options.silent, exam).encode())
    text = to_markdown(scores, outside, outcomes, about, agreements, exam, right, unseen, edited, beside)
    if options.output is None:
        print(text)
    else:
        write_atomically(options.output, f"{text.rstrip()}\n".encode())


def _faults(module: str) -> Any:
    try:
        return importlib.import_module(f"tests.faults.{module}")
    except ModuleNotFoundError:
        raise InputError("tests/faults: no such folder; run this from the root of the repository") from None


def _agreements(scores: Sequence[Score]) -> dict[str, str]:
    """Return for each public thread that was run how far the check agrees with it."""
    known = _faults("threads").THREADS if scores else {}
    return {score.question.label: threads.agreement(known[score.question.label], score) for score in scores}


def _questions(part: str, faults: Any, options: ScoreboardOptions, folder: Path) -> Iterator[Question]:
    """Yield the questions of a part, one per port; ports that are files are written into the folder."""

    def question(label: str, scenario: Any, *labels: str) -> Question:
        accepted = tuple(
            frozenset({faults.fault_of(one), *faults.PLANTED[one].also}) for one in labels if one in faults.PLANTED
        )
        accepted += tuple(
            frozenset({name}) for one in labels for name in getattr(faults.UNCATALOGUED.get(one), "named", ())
        )
        source = faults.PlantedPort(scenario, labels)
        return Question(source, label, scenario.name, scenario.optimizer, scenario.world_size, scenario.steps, accepted)

    if part == "clean":
        for seed in range(options.clean_seeds):
            name, optimizer = CLEAN[seed % len(CLEAN)]
            scenario = faults.Scenario(name, optimizer, steps=options.clean_steps, seed=seed)
            if fnmatch.fnmatch(f"seed {seed}", options.only):
                yield question(f"seed {seed}", scenario)
    elif part == "threads":
        known = _faults("threads")
        yield from threads.questions(known.THREADS, known.write_port, options.only, folder)
    elif part == "pairs":
        for scenario, one, other in faults.PAIRS:
            if fnmatch.fnmatch(f"{one} + {other}", options.only):
                yield question(f"{one} + {other}", scenario, one, other)
    else:
        for label, planted in (faults.PLANTED if part == "planted" else faults.UNCATALOGUED).items():
            if fnmatch.fnmatch(label, options.only):
                yield from (question(label, scenario, label) for scenario in planted.scenarios)


def _outside(options: ScoreboardOptions, kept: Kept, workers: Workers) -> Iterator[OutsideScore]:
    for label, fault in fault_module().OUTSIDE.items():
        if not fnmatch.fnmatch(label, options.only):
            continue
        if (result := kept.outside(("outside", label), fault)) is None:
            result = score_outside(label, fault, workers)
            kept.add(("outside", label), result)
            mark = "named" if result.named else "WRONG" if result.wrong else result.verdict
            said = "; ".join(filter(None, [*result.said, *result.problems]))
            where = ", ".join(map(str, result.places))
            patched = "patched" if result.patched else ""
            print(f"{mark:10} {patched:8} {result.seconds:5.1f} s  {label:36} {where:50} {said}".rstrip(), flush=True)
        yield result


def _unseen(options: ScoreboardOptions, kept: Kept, workers: Workers) -> Iterator[UnseenScore]:
    for label, names in questions().items():
        if not fnmatch.fnmatch(label, options.only):
            continue
        if (result := kept.unseen(("unseen", label))) is None:
            result = score_unseen(label, names, workers)
            kept.add(("unseen", label), result)
            mark = "named" if result.named else "WRONG" if result.wrong else result.verdict
            place = "located" if result.located else f"{result.jax_line:d}{result.torch_line:d} {result.largest}"
            print(f"{mark:10} {place:8} {result.seconds[0]:5.1f} s  {label:36} {'; '.join(result.said)}", flush=True)
        yield result


def _right(part: str, options: ScoreboardOptions, kept: Kept) -> Iterator[RightScore]:
    module = right_module()
    ports, score_of = {
        "right": (module.right_ports, score_right),
        "beside": (module.ports_with_fault, score_beside),
    }[part]
    with mock.patch.dict(os.environ), Workers(WORLD_SIZE, "cpu") as workers:
        compile_faster()
        for port in (port for port in ports() if fnmatch.fnmatch(port.name, options.only)):
            if (result := kept.right((part, port.name))) is None:
                result = score_of(port, workers)
                kept.add((part, port.name), result)
                print(f"{result.verdict:10} {result.seconds:5.1f} s  {port.name}  {result.said}".rstrip(), flush=True)
            yield result


def _exam(options: ScoreboardOptions, kept: Kept) -> Iterator[ExamScore]:
    exam = exam_module()
    mutants = exam.share_of_exam(options.share)
    with mock.patch.dict(os.environ), Workers(exam.WORLD_SIZE, "cpu") as workers:
        compile_faster()  # measured: 12 s of CPU time for the largest port, 20 s without it
        for mutant in (mutant for mutant in mutants if fnmatch.fnmatch(mutant.name, options.only)):
            if (result := kept.exam(("exam", mutant.name))) is None:
                result = examine(mutant, workers)
                kept.add(("exam", mutant.name), result)
                print(f"{result.outcome:10} {result.seconds:5.1f} s  {mutant}  {result.said}".rstrip(), flush=True)
            yield result


def _edited(options: ScoreboardOptions, kept: Kept) -> Iterator[EditedScore]:
    exam = exam_module()
    with mock.patch.dict(os.environ), Workers(exam.WORLD_SIZE, "cpu") as workers:
        compile_faster()
        for mutant in exam.further_mutants(options.edited_ports):
            if not fnmatch.fnmatch(mutant.name, options.only):
                continue
            if (result := kept.edited(("edited", mutant.name))) is None:
                result = score_edited(mutant, workers)
                kept.add(("edited", mutant.name), result)
                marks = "".join(
                    letter if mark else "-"
                    for letter, mark in zip("nlp", (result.named, result.line, result.patched), strict=True)
                )
                found = f"{result.verdict:10} {marks} {result.largest:3} {result.seconds[0]:5.1f} s"
                print(f"{found}  {mutant}  {'; '.join(result.said)}", flush=True)
            yield result


def _mutants(options: ScoreboardOptions, kept: Kept) -> Iterator[Outcome]:
    listed = importlib.import_module("tests.faults.mutants").MUTANTS
    chosen = [mutant for mutant in listed if fnmatch.fnmatch(mutant.name, options.only)]
    yield from (known for mutant in chosen if (known := kept.outcome(("mutants", mutant.name))) is not None)
    for outcome in run_mutants(Path.cwd(), [m for m in chosen if kept.outcome(("mutants", m.name)) is None]):
        kept.add(("mutants", outcome.name), outcome)
        print(f"{'killed  ' if outcome.killed else 'SURVIVES'} {outcome.name}  {outcome.by}", flush=True)
        yield outcome


def _line(one: Score, agreement: str = "") -> str:
    question = one.question
    mark = agreement or ("named" if one.named else "WRONG" if one.wrong else one.verdict)
    said = "; ".join(" or ".join(names) or "?" for names in one.said)
    title = f"{question.label} in {question.port} x{question.world_size}"
    steps = f"{one.steps} steps" if one.steps else ""
    return f"{mark:10} {one.seconds:5.1f} s  {title:70} {said}  {steps}  {'; '.join(one.problems)}".rstrip()


def run(argv: Sequence[str]) -> None:
    """Run the command line."""
    with cli.one_line_errors("--traceback" in argv):
        words = [word for word in argv if word != "--traceback"]
        main(cli.parse_plain(ScoreboardOptions, words, PROG), words)


if __name__ == "__main__":
    run(sys.argv[1:])
