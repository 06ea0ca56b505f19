"""Propose patches: try the candidates of each cause, one cause after another, and keep what removes its difference."""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from jaxddp.parity.coverage import ASPECTS
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.findings import Cause, Difference, Patch, groups
from jaxddp.parity.operations import SourceLine
from jaxddp.parity.patch.candidates import candidates
from jaxddp.parity.patch.edited_files import EditedFiles
from jaxddp.parity.patch.trials import Trials
from jaxddp.parity.port.replaced_files import Texts
from jaxddp.parity.progress import PATCHES
from jaxddp.parity.runs import Runs
from jaxddp.parity.user_code.homes import home_of_stage

MOST = 40  # edits of one difference that are tried
EACH = 6  # edits of each cause that are tried, where several make one difference
UNKNOWN = Cause((), 0.0)  # of a difference that has none: the two files show what may be edited
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
    files: EditedFiles,
    further: int = 0,
) -> list[Difference]:
    """Return the differences with patches, and edit the texts of the port's files.

    Args:
        runs: the runs of the check.
        evidence: the runs, compared.
        searches: runs the trials.
        differences: what the check has found.
        drifts: returns whether an edited port's own run drifts from the reference.
        files: the port's files.
        further: additional differences that no step shows: of types, and of rates after the run.
    """
    if not differences:
        return []
    proposals = Proposals(files, Trials(runs, searches.workers, evidence), searches, drifts, further)
    return proposals.of(differences)


class Proposals:
    """Patches of a port.

    Args:
        files: its files, whose texts are edited.
        trials: trials of edits.
        searches: runs them.
        drifts, further: see `with_patches`.
    """

    def __init__(
        self,
        files: EditedFiles,
        trials: Trials,
        searches: InterruptibleSearches,
        drifts: Callable[[Runs], bool],
        further: int = 0,
    ):
        self._files, self._trials, self._searches, self._drifts = files, trials, searches, drifts
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
            return REMOVED if self._files.texts else NOT_FORCED
        for difference in group:
            home = self._home(difference, "jax")
            if home is None:
                return NO_LINE
            if not self._files.has(home.path):
                return NOT_BESIDE.format(Path(home.path).name)
        return ""

    def _home(self, difference: Difference, side: str) -> SourceLine | None:
        """Return the line that is quoted of a side, or that of the function that computes the stage."""
        found = difference.cause or difference
        quote = found.jax if side == "jax" else found.torch
        if quote is None:
            return home_of_stage(self._files.port, difference.stage, side)
        return SourceLine(quote.path, quote.line)

    def _search(self, group: Sequence[Difference]) -> tuple[list[str], bool] | int:
        """Return the diff of each difference, and whether the edited port drifts; or the number of edits tried."""
        tried, difference = 0, group[0]
        most = MOST if len(group) == 1 else EACH ** len(group)
        for chain in itertools.islice(self._chains(self._files.texts, group), most):
            self._searches.progress.stop.poll()
            tried += 1
            texts = chain[-1]
            if not self._trials.screen(texts, difference) or (runs := self._trials.confirm(texts, difference)) is None:
                continue
            self._trials.accept(runs)
            steps = zip([self._files.texts, *chain], chain, strict=False)
            diffs = [self._files.diff(before, after) for before, after in steps]
            self._files.texts = dict(texts)
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
        home, there = self._home(difference, "jax"), self._home(difference, "torch")
        assert home is not None, "checked by _why_none"
        path = os.path.realpath(home.path)
        text = self._files.text(path, texts)
        torch = None
        if text is None:
            return
        if there is not None and (of_torch := self._files.text(there.path, {})) is not None:
            torch = of_torch, there.number
        line = self._files.line(home.number, path, text)
        try:
            yield from (dict(texts) | {path: one} for one in candidates(text, line, difference.cause or UNKNOWN, torch))
        except SyntaxError:  # of another version of Python
            return
