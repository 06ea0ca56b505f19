"""Propose patches: try the candidates of each cause, one cause after another, and keep what removes its difference."""

import difflib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from jaxddp.parity.coverage import ASPECTS
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.findings import Cause, Difference, Patch
from jaxddp.parity.operations import SourceLine
from jaxddp.parity.patch.candidates import candidates
from jaxddp.parity.patch.trials import Texts, Trials
from jaxddp.parity.port import PortFile
from jaxddp.parity.port.draws import DrawnSource
from jaxddp.parity.progress import PATCHES
from jaxddp.parity.report.words import groups
from jaxddp.parity.runs import Runs
from jaxddp.parity.user_code.homes import home_of_stage

MOST = 40  # edits of one difference that are tried
EACH = 6  # edits of each cause that are tried, where several make one difference
UNKNOWN = Cause((), (), (), 0.0)  # of a difference that has none: the two files show what may be edited
NO_LINE = "the line of the JAX side is not known"
NOT_BESIDE = "{} is not in the folder of the port"
NO_EDIT = "none of the {} edits that were tried removes the difference"
ADVICE = "no edit of the quoted lines follows from the fix, which is advice"
ROUNDING = "the difference is one of rounding"
ENDED = "the check was ended early"
REMOVED = "the patch of another difference removes it"
NOT_FORCED = "it shows only where the port runs by itself"
NOT_FINITE = "the values are not finite"


def with_patches(
    runs: Runs,
    evidence: Evidence,
    searches: InterruptibleSearches,
    differences: Sequence[Difference],
    drifts: Callable[[Runs], bool],
    further: int,
) -> tuple[list[Difference], str]:
    """Return the differences with patches, and the diff of all patches together; only ports in files are patched.

    Args:
        runs: the runs of the check.
        evidence: the runs, compared.
        searches: runs the trials.
        differences: what the check has found.
        drifts: returns whether an edited port's own run drifts from the reference.
        further: differences beside them that no step shows: of types, and of rates after the run.
    """
    source = getattr(runs.case, "source", None)
    source = source.source if isinstance(source, DrawnSource) else source
    if not isinstance(source, PortFile) or not differences:
        return [*differences], ""
    proposals = Proposals(Path(source.path), Trials(runs, searches.workers, evidence), searches, drifts, further)
    return proposals.of(differences), proposals.diff


class Proposals:
    """Patches of a port.

    Args:
        port: the port file.
        trials: trials of edits.
        searches: runs them.
        drifts, further: see `with_patches`.
    """

    def __init__(
        self,
        port: Path,
        trials: Trials,
        searches: InterruptibleSearches,
        drifts: Callable[[Runs], bool],
        further: int = 0,
    ):
        self._port = Path(os.path.realpath(port))
        self._folder = self._port.parent
        self._trials, self._searches, self._drifts = trials, searches, drifts
        self._first: dict[str, str] = {}  # texts of the files as they are
        self._texts: dict[str, str] = {}  # those of the files that patches edit
        self._left = self._unseen = further  # differences without a patch, and those of them that no step shows
        self._patched = 0  # differences with one

    def of(self, differences: Sequence[Difference]) -> list[Difference]:
        """Return the differences, their causes with patches."""
        patched: list[Difference] = []
        self._left += len(differences)
        self._unseen += sum(difference.stage in ASPECTS for difference in differences)
        with self._searches.progress.stage(PATCHES):
            for group in groups(differences):
                patched += self._of_group(group)
        return patched

    @property
    def diff(self) -> str:
        """All patches together."""
        return self._diff(self._first, self._texts)

    def _of_group(self, group: Sequence[Difference]) -> list[Difference]:
        why = self._why_none(group)
        found = None if why else self._searches.run(lambda: self._search(group), [])
        if found is None or isinstance(found, int):
            why = why or (ENDED if self._searches.ended else NO_EDIT.format(found) if found else ADVICE)
            patches = [Patch("none", why_not=why) for _ in group]
        else:
            diffs, drifts = found
            self._left, self._patched = self._left - len(group), self._patched + len(group)
            others = max(1, self._left) if self._trials.before or drifts or self._unseen else 0
            verdict = "gone" if others else "equal"
            patches = [Patch(verdict, diff, others, together=self._patched) for diff in diffs]
        return [replace(one, patch=patch) for one, patch in zip(group, patches, strict=True)]

    def _why_none(self, group: Sequence[Difference]) -> str:
        """Return why no patch is sought; "" if one is."""
        if group[0].kind == "numeric" or group[0].not_finite:
            return NOT_FINITE if group[0].not_finite else ROUNDING
        if not self._trials.has(group[0]):
            return REMOVED if self._texts else NOT_FORCED
        for difference in group:
            home = self._home(difference, "flax")
            if home is None:
                return NO_LINE
            if not Path(os.path.realpath(home.path)).is_relative_to(self._folder):
                return NOT_BESIDE.format(Path(home.path).name)
        return ""

    def _home(self, difference: Difference, side: str) -> SourceLine | None:
        """Return the line that is quoted of a side, or that of the function that computes the stage."""
        found = difference.cause or difference
        quote = found.jax if side == "flax" else found.torch
        return (
            home_of_stage(self._port, difference.stage, side) if quote is None else SourceLine(quote.path, quote.line)
        )

    def _search(self, group: Sequence[Difference]) -> tuple[list[str], bool] | int:
        """Return the diff of each difference, and whether the edited port drifts; or the number of edits tried."""
        tried, difference = 0, group[0]
        most = MOST if len(group) == 1 else EACH ** len(group)
        for chain in itertools.islice(self._chains(self._texts, group), most):
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

    def _chains(self, texts: Texts, group: Sequence[Difference]) -> Iterator[list[Texts]]:
        """Yield edits of all causes together, as the texts after each of them, the likeliest first."""
        difference, *others = group
        edited = self._edited(texts, difference)
        if not others:
            yield from ([one] for one in edited)
            return
        for one in itertools.islice(edited, EACH):
            for rest in itertools.islice(self._chains(one, others), EACH ** len(others)):
                yield [one, *rest]

    def _edited(self, texts: Texts, difference: Difference) -> Iterator[Texts]:
        """Yield the texts with one candidate for a difference."""
        home, there = self._home(difference, "flax"), self._home(difference, "torch")
        assert home is not None, "checked by _why_none"
        path = os.path.realpath(home.path)
        text = self._text(path, texts)
        torch = None
        if text is None:
            return
        if there is not None and (of_torch := self._text(there.path, {})) is not None:
            torch = of_torch, there.number
        line = moved(home.number, self._first[path], text)
        try:
            yield from (dict(texts) | {path: one} for one in candidates(text, line, difference.cause or UNKNOWN, torch))
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
