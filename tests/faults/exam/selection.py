"""Choose the mutants of the exam: edited halves of correct ports, once and for all, by the hash of their names."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice

from .operators import Edit, edits, is_a_program
from .ports import PORTS, ExamPort

SEED = "jaxddp, issue 49"
COUNTS = {"jax": 500, "torch": 200}
RENAMED = re.compile(r"\bjax_(?:model|loss|step|optimizer|batch|start|restore|metrics)\b")


@dataclass(frozen=True)
class Mutant:
    """A correct port with one edit.

    Attributes:
        port: name of the port.
        half: the half that is edited, "jax" or "torch".
        edit: the edit.
    """

    port: str
    half: str
    edit: Edit

    @property
    def name(self) -> str:
        """Return the port, half, operator, line, column and variant, as "gpt/jax/number/20:5/1"."""
        edit = self.edit
        return f"{self.port}/{self.half}/{edit.operator}/{edit.line}:{edit.column}/{edit.variant}"

    @property
    def first_name(self) -> str:
        """Return the name when the exam was fixed: the fields of the JAX half began with flax_, not jax_."""
        edit = self.edit
        line = self.source.sources[self.half].text.splitlines()[edit.line - 1]
        column = edit.column + len(RENAMED.findall(line[: edit.column - 1]))
        return f"{self.port}/{self.half}/{edit.operator}/{edit.line}:{column}/{edit.variant}"

    @property
    def source(self) -> ExamPort:
        """Return the correct port."""
        return PORTS[self.port]

    @property
    def text(self) -> str:
        """Return the text of the edited half's file."""
        return self.edit.apply(self.source.sources[self.half].text)

    @property
    def place(self) -> tuple[str, int]:
        """Return the file and the line of the edit."""
        return self.source.halves[self.half], self.edit.line

    def __str__(self) -> str:
        """Return the name with the code before and after the edit, in a line."""
        before, after = (" ".join(code.split()) for code in (self.edit.before, self.edit.after))
        return f"{self.name}: {before} -> {after or '(nothing)'}"


def digest(mutants: Iterable[Mutant]) -> str:
    """Return a hash of the mutants, which an edit of a port, an operator or the choice changes."""
    lines = [f"{mutant.name} {mutant.edit.before!r} {mutant.edit.after!r}" for mutant in mutants]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@cache
def chosen(half: str) -> tuple[Mutant, ...]:
    """Return the mutants of a half: each operator in each port in turn, until there are as many as `COUNTS` says."""
    mutants: dict[tuple[str, str], Mutant] = {}
    for mutant in _in_turn(half):
        if len(mutants) == COUNTS[half]:
            break
        key = mutant.port, mutant.text
        if key not in mutants and not mutant.edit.is_none and is_a_program(mutant.text):
            mutants[key] = mutant
    return tuple(mutants.values())


def share_of_exam(share: float = 1.0) -> tuple[Mutant, ...]:
    """Return a share of all mutants, always the same ones; a larger share contains a smaller one."""
    mutants = [mutant for half in COUNTS for mutant in chosen(half)]
    ranked = sorted(mutants, key=lambda mutant: _rank(f"share {mutant.first_name}"))
    return tuple(ranked[: max(1, round(share * len(ranked)))])


def further_mutants(count: int) -> tuple[Mutant, ...]:
    """Return mutants that are not of the exam, always the same ones; more contain fewer."""
    texts = {(mutant.port, mutant.text) for half in COUNTS for mutant in chosen(half)}
    others: dict[tuple[str, str], Mutant] = {}
    for mutant in (mutant for half in COUNTS for mutant in _in_turn(half)):
        key = mutant.port, mutant.text
        if key not in texts and not mutant.edit.is_none:
            others.setdefault(key, mutant)
    ranked = sorted(others.values(), key=lambda mutant: _rank(f"further {mutant.first_name}"))
    return tuple(islice((mutant for mutant in ranked if is_a_program(mutant.text)), count))


def _in_turn(half: str) -> Iterator[Mutant]:
    """Yield all mutants of a half: round by round, at most one of each operator in each port."""
    cells: dict[tuple[str, str], list[Mutant]] = defaultdict(list)
    for name, port in PORTS.items():
        for edit in edits(port.sources[half], port.statements(half), half):
            cells[name, edit.operator].append(Mutant(name, half, edit))
    queues = [sorted(cells[cell], key=lambda mutant: _rank(mutant.first_name)) for cell in sorted(cells, key=_rank)]
    for number in range(max(map(len, queues))):
        yield from (queue[number] for queue in queues if number < len(queue))


def _rank(key: object) -> str:
    return hashlib.sha256(f"{SEED}: {key}".encode()).hexdigest()
