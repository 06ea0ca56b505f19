"""`python -m benchmarks.scoreboard`: score the parity check on planted faults, correct ports and mutants."""

import fnmatch
import importlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scoreboard.document import to_markdown
from benchmarks.scoreboard.kept import Kept
from benchmarks.scoreboard.mutants import Outcome, run_mutants
from benchmarks.scoreboard.score import Question, Score, score
from jaxddp import cli
from jaxddp.errors import InputError, check_name
from jaxddp.files import write_atomically
from jaxddp.parity.environment import environment
from jaxddp.parity.workers import Workers

PROG = "python -m benchmarks.scoreboard"
PARTS = ("planted", "pairs", "uncatalogued", "clean", "mutants")
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
    """planted | pairs | uncatalogued | clean | mutants."""
    only: str = "*"
    """Run only the faults, pairs, correct ports ("seed 7") and mutants whose name matches this pattern."""
    clean_seeds: int = 100
    """Number of correct ports to check for false alarms."""
    clean_steps: int = 300
    """Number of steps of each correct port."""
    scores: Path | None = None
    """Append every result to this file; results that are in it already are not run again."""
    output: Path | None = None
    """Write the scoreboard to this Markdown file."""

    def __post_init__(self) -> None:
        for part in self.parts:
            check_name("--parts", part, PARTS)
        for name in ("clean_seeds", "clean_steps"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")


def main(options: ScoreboardOptions, argv: Sequence[str]) -> None:
    """Run the parts, print a line for each port, and write the scoreboard."""
    faults, kept = _faults(), Kept(options.scores)
    scores: dict[str, list[Score]] = {}
    with Workers(4, "cpu") as workers:
        for part in (part for part in PARTS if part in options.parts and part != "mutants"):
            scores[part] = []
            for question in _questions(part, faults, options):
                key = (part, *map(str, (question.label, question.scenario, question.optimizer)))
                key += (str(question.world_size), str(question.steps))
                if (result := kept.score(key, question)) is None:
                    # A correct port must not be reported as different in rounding either.
                    result = score(question, workers, part in ("planted", "pairs"), float32=part == "clean")
                    kept.add(key, result)
                    print(_line(result), flush=True)
                scores[part].append(result)
    outcomes = list(_mutants(options, kept)) if "mutants" in options.parts else []
    if not outcomes and not any(scores.values()):
        raise InputError(f"--only {options.only}: matches nothing in {', '.join(options.parts)}")
    command = shlex.join([*PROG.split(), *argv])
    text = to_markdown(scores, outcomes, {**environment(), "command": command, "date": kept.when()})
    if options.output is None:
        print(text)
    else:
        write_atomically(options.output, f"{text.rstrip()}\n".encode())


def _faults() -> Any:
    try:
        return importlib.import_module("tests.faults.planted")
    except ModuleNotFoundError:
        raise InputError("tests/faults: no such folder; run this from the root of the repository") from None


def _questions(part: str, faults: Any, options: ScoreboardOptions) -> Iterator[Question]:
    """Yield the questions of a part, one per port."""

    def question(label: str, scenario: Any, *labels: str) -> Question:
        accepted = tuple(
            frozenset({faults.fault_of(one), *faults.PLANTED[one].also}) for one in labels if one in faults.PLANTED
        )
        source = faults.PlantedPort(scenario, labels)
        return Question(source, label, scenario.name, scenario.optimizer, scenario.world_size, scenario.steps, accepted)

    if part == "clean":
        for seed in range(options.clean_seeds):
            name, optimizer = CLEAN[seed % len(CLEAN)]
            scenario = faults.Scenario(name, optimizer, steps=options.clean_steps, seed=seed)
            if fnmatch.fnmatch(f"seed {seed}", options.only):
                yield question(f"seed {seed}", scenario)
    elif part == "pairs":
        for scenario, one, other in faults.PAIRS:
            if fnmatch.fnmatch(f"{one} + {other}", options.only):
                yield question(f"{one} + {other}", scenario, one, other)
    else:
        for label, planted in (faults.PLANTED if part == "planted" else faults.UNCATALOGUED).items():
            if fnmatch.fnmatch(label, options.only):
                yield from (question(label, scenario, label) for scenario in planted.scenarios)


def _mutants(options: ScoreboardOptions, kept: Kept) -> Iterator[Outcome]:
    listed = importlib.import_module("tests.faults.mutants").MUTANTS
    chosen = [mutant for mutant in listed if fnmatch.fnmatch(mutant.name, options.only)]
    yield from (known for mutant in chosen if (known := kept.outcome(("mutants", mutant.name))) is not None)
    for outcome in run_mutants(Path.cwd(), [m for m in chosen if kept.outcome(("mutants", m.name)) is None]):
        kept.add(("mutants", outcome.name), outcome)
        print(f"{'killed  ' if outcome.killed else 'SURVIVES'} {outcome.name}  {outcome.by}", flush=True)
        yield outcome


def _line(one: Score) -> str:
    question = one.question
    mark = "named" if one.named else "WRONG" if one.wrong else one.verdict
    said = "; ".join(" or ".join(names) or "?" for names in one.said)
    title = f"{question.label} in {question.scenario} {question.optimizer} x{question.world_size}"
    steps = f"{one.steps} steps" if one.steps else ""
    return f"{mark:10} {one.seconds:5.1f} s  {title:70} {said}  {steps}  {'; '.join(one.problems)}".rstrip()


def run(argv: Sequence[str]) -> None:
    """Run the command line."""
    with cli.one_line_errors("--traceback" in argv):
        words = [word for word in argv if word != "--traceback"]
        main(cli.parse_plain(ScoreboardOptions, words, PROG), words)


if __name__ == "__main__":
    run(sys.argv[1:])
