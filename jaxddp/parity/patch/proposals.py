"""Propose patches: try the candidates of each cause, one cause after another, and keep what removes its difference."""

import difflib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.findings import Cause, Difference, Patch, Quote
from jaxddp.parity.patch.candidates import candidates
from jaxddp.parity.patch.homes import Home, home_of_stage
from jaxddp.parity.patch.trials import Texts, Trials
from jaxddp.parity.progress import PATCHES
from jaxddp.parity.report.words import groups
from jaxddp.parity.runs import Runs

MOST = 40  # edits of one difference that are tried
EACH = 6  # edits of each cause that are tried, where several make one difference
NO_LINE = "the line of the JAX side is not known"
NOT_BESIDE = "{} is not in the folder of the port"
NO_EDIT = "none of the {} edits that were tried removes the difference"
ADVICE = "no edit of the quoted lines follows from the fix, which is advice"
ROUNDING = "the difference is one of rounding"
ENDED = "the check was ended early"
NOT_FINITE = "the values are not finite"


class Proposals:
    """Patches of a port.

    Args:
        port: the port file.
        trials: trials of edits.
        searches: runs them.
        drifts: returns whether an edited port's own run drifts from the reference.
    """

    def __init__(self, port: Path, trials: Trials, searches: InterruptibleSearches, drifts: Callable[[Runs], bool]):
        self._port = Path(os.path.realpath(port))
        self._folder = self._port.parent
        self._trials, self._searches, self._drifts = trials, searches, drifts
        self._first: dict[str, str] = {}  # texts of the files as they are
        self._texts: dict[str, str] = {}  # those of the files that patches edit
        self._left = 0  # differences that no patch removes

    def of(self, differences: Sequence[Difference]) -> list[Difference]:
        """Return the differences, their causes with patches."""
        patched, self._left = [], len(differences)
        with self._searches.progress.stage(PATCHES):
            for group in groups(differences):
                patched += self._of_group(group) if all(one.cause for one in group) else group
        return patched

    @property
    def diff(self) -> str:
        """All patches together."""
        return self._diff(self._first, self._texts)

    def _of_group(self, group: Sequence[Difference]) -> list[Difference]:
        causes = [one.cause for one in group if one.cause]
        why = self._why_none(group[0], causes)
        found = None if why else self._searches.run(lambda: self._search(group[0], causes), [])
        if found is None or isinstance(found, int):
            why = why or (ENDED if self._searches.ended else NO_EDIT.format(found) if found else ADVICE)
            patches = [Patch("none", why_not=why) for _ in causes]
        else:
            diffs, drifts = found
            self._left -= len(group)
            others = max(1, self._left) if self._trials.before or drifts else 0
            patches = [Patch("gone" if others else "equal", diff, others) for diff in diffs]
        pairs = zip(group, causes, patches, strict=True)
        return [replace(one, cause=replace(cause, patch=patch)) for one, cause, patch in pairs]

    def _why_none(self, difference: Difference, causes: Sequence[Cause]) -> str:
        """Return why no patch is sought; "" if one is."""
        if difference.kind == "numeric" or difference.not_finite:
            return NOT_FINITE if difference.not_finite else ROUNDING
        for cause in causes:
            home = self._home(difference.stage, cause.jax, "flax")
            if home is None:
                return NO_LINE
            if not Path(os.path.realpath(home.path)).is_relative_to(self._folder):
                return NOT_BESIDE.format(Path(home.path).name)
        return ""

    def _home(self, stage: str, quote: Quote | None, side: str) -> Home | None:
        """Return the line that is quoted, or that of the function that computes the stage."""
        return home_of_stage(self._port, stage, side) if quote is None else Home(quote.path, quote.line)

    def _search(self, difference: Difference, causes: Sequence[Cause]) -> tuple[list[str], bool] | int:
        """Return the diff of each cause, and whether the edited port drifts; or the number of edits that were tried."""
        tried = 0
        most = MOST if len(causes) == 1 else EACH ** len(causes)
        for chain in itertools.islice(self._chains(self._texts, difference.stage, causes), most):
            self._searches.progress.stop.poll()
            tried += 1
            texts = chain[-1]
            if not self._trials.screen(texts, difference) or (runs := self._trials.confirm(texts, difference)) is None:
                continue
            self._trials.accept(runs)
            steps = zip([self._texts, *chain], chain, strict=False)
            diffs = [self._diff(before, after) for before, after in steps]
            self._texts = dict(texts)
            return diffs, not self._trials.before and self._drifts(runs)
        return tried

    def _chains(self, texts: Texts, stage: str, causes: Sequence[Cause]) -> Iterator[list[Texts]]:
        """Yield edits of all causes together, as the texts after each of them, the likeliest first."""
        cause, *others = causes
        edited = self._edited(texts, stage, cause)
        if not others:
            yield from ([one] for one in edited)
            return
        for one in itertools.islice(edited, EACH):
            for rest in itertools.islice(self._chains(one, stage, others), EACH ** len(others)):
                yield [one, *rest]

    def _edited(self, texts: Texts, stage: str, cause: Cause) -> Iterator[Texts]:
        """Yield the texts with one candidate for a cause."""
        home, there = self._home(stage, cause.jax, "flax"), self._home(stage, cause.torch, "torch")
        assert home is not None, "checked by _why_none"
        path = os.path.realpath(home.path)
        text = self._text(path, texts)
        torch = None
        if text is None:
            return
        if there is not None and (of_torch := self._text(there.path, {})) is not None:
            torch = of_torch, there.line
        line = moved(home.line, self._first[path], text)
        try:
            yield from (dict(texts) | {path: one} for one in candidates(text, line, cause, torch))
        except SyntaxError:  # of another version of Python
            return

    def _text(self, path: str, texts: Texts) -> str | None:
        """Return the text of a file, edited or as it is; None if it cannot be read."""
        path = os.path.realpath(path)
        if path not in self._first:
            try:
                self._first[path] = Path(path).read_bytes().decode()
            except (OSError, UnicodeDecodeError):
                return None
        return texts.get(path, self._first[path])

    def _diff(self, before: Texts, after: Texts) -> str:
        pairs = ((path, before.get(path, self._first[path]), text) for path, text in after.items())
        return "".join(unified(Path(path).relative_to(self._folder).as_posix(), *of_file) for path, *of_file in pairs)


def moved(line: int, before: str, after: str) -> int:
    """Return the number of a line after edits.

    >>> moved(2, "a\\nb\\n", "a\\nnew\\nb\\n")
    3
    """
    matcher = difflib.SequenceMatcher(None, before.split("\n"), after.split("\n"), autojunk=False)
    for _, i1, i2, j1, j2 in matcher.get_opcodes():
        if i1 <= line - 1 < i2:
            return min(j1 + line - i1, max(j2, j1 + 1))
    return line


def unified(name: str, before: str, after: str) -> str:
    """Return the unified diff of a file, as `patch -p1` and `git apply` take it; "" if nothing differs.

    >>> print(unified("model.py", "x = 1\\n", "x = 2"), end="")
    --- a/model.py
    +++ b/model.py
    @@ -1 +1 @@
    -x = 1
    +x = 2
    \\ No newline at end of file
    """
    end = "\t" * (" " in name)  # as git ends names with spaces
    lines = difflib.unified_diff(_lines(before), _lines(after), f"a/{name}{end}", f"b/{name}{end}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _lines(text: str) -> list[str]:
    """Cut text at its newlines, and nowhere else.

    >>> _lines("a\\x0cb\\nc")
    ['a\\x0cb\\n', 'c']
    """
    parts = text.split("\n")
    return [f"{line}\n" for line in parts[:-1]] + [parts[-1]] * bool(parts[-1])
