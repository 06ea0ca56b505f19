"""Trials of edits: the check runs again with the edited texts in place of the files, and is compared with the first."""

import shutil
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from jaxddp.parity.case_interface import AnyCase
from jaxddp.parity.cases import PortCase
from jaxddp.parity.compare.judge import Located
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.diagnosis.multi_loss import differing_losses, differing_updates
from jaxddp.parity.diagnosis.optimizer.update import differing_update
from jaxddp.parity.findings import Difference
from jaxddp.parity.jax_side.child import Forced
from jaxddp.parity.port import PortFile, PortSource
from jaxddp.parity.port.draws import DrawnSource
from jaxddp.parity.port.replaced_files import Texts
from jaxddp.parity.processes import ChildError
from jaxddp.parity.progress import Progress
from jaxddp.parity.records import Records
from jaxddp.parity.runs import Runs
from jaxddp.parity.workers import Workers

Places = dict[str, Located]  # stage, and loss or optimizer if there are several -> where it first differs
MARGIN = 1.01  # growth of a residual that counts as no change
AHEAD = 1  # steps after the first that differs in which an edit is tried before it is tried in all


class Trials:
    """Trials of edits of a port's files, which are never changed.

    Args:
        runs: the runs of the check.
        workers: processes in which trials run.
        evidence: the runs, compared.
    """

    def __init__(self, runs: Runs, workers: Workers, evidence: Evidence):
        self._runs, self._workers, self._evidence = runs, workers, evidence
        self.before = places(evidence)
        self.count = 0

    def has(self, difference: Difference) -> bool:
        """Return whether a difference shows in a step from the reference's state, and no patch has removed it."""
        return bool(self._of(difference))

    def screen(self, texts: Texts, difference: Difference) -> bool:
        """Return whether a difference is gone if only JAX runs again, and none is new."""
        self.count += 1
        folder = self._runs.path(f"trial{self.count}")
        evidence = self._evidence
        first = max(located.step for located in self._of(difference).values())
        case, most = self._case(evidence.case, texts), min(first + AHEAD, evidence.case.steps)
        try:
            self._workers.jax.do(Forced(case, evidence.start, evidence.torch_folder, folder, most))
            return self._is_better(places(self._runs.evidence(most, Records([folder]))), difference)
        except ChildError as error:
            self._workers.end_after(error)
            return False
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def confirm(self, texts: Texts, difference: Difference) -> Runs | None:
        """Check the edited port in float64, both sides; return its runs if the difference is gone and none is new."""
        case = self._case(self._runs.case, texts, drawn=False)
        progress = Progress(case.steps, stop=self._runs.progress.stop, tell=lambda line: None)
        runs = Runs(case, self._workers, self._runs.seed, progress)
        runs.in_float64()
        lengths = (len(runs.torch), len(runs.jax)) == (len(self._runs.torch), len(self._runs.jax))
        complete = not runs.problems and lengths and self._is_same_reference(runs)
        return runs if complete and self._is_better(places(runs.evidence()), difference) else None

    def accept(self, runs: Runs) -> None:
        """Compare later edits with these runs of an edited port."""
        self.before = places(runs.evidence())

    def _case(self, case: AnyCase, texts: Texts, drawn: bool = True) -> PortCase:
        """Return the case of the edited files; `drawn`: with draws paired as before."""
        assert isinstance(case, PortCase), "only files are patched"
        source = case.source.source if isinstance(case.source, DrawnSource) else case.source
        assert isinstance(source, PortFile), "only files are patched"
        edited: PortSource = replace(source, texts=(*texts.items(),))
        if drawn and isinstance(case.source, DrawnSource):
            edited = replace(case.source, source=edited)
        return replace(case, source=edited)

    def _of(self, difference: Difference) -> Places:
        """Return the places in which a difference shows; with several losses or optimizers, those of its tensor."""
        return {
            name: located
            for name, located in self.before.items()
            if name == difference.stage
            or (name.startswith(f"{difference.stage}:") and located.tensor == difference.tensor)
        }

    def _is_better(self, after: Places, difference: Difference) -> bool:
        """Return whether a difference is gone, and no other stage differs earlier or more than before."""
        if not after.keys().isdisjoint(self._of(difference)):
            return False
        return all(
            name in self.before
            and located.step >= self.before[name].step
            and located.residual <= MARGIN * self.before[name].residual
            for name, located in after.items()
        )

    def _is_same_reference(self, runs: Runs) -> bool:
        """Return whether torch's run is the same, so that an edit of a shared file does not change the reference."""
        pairs = zip(runs.torch, self._runs.torch, strict=True)
        return all(
            one[stage].keys() == other[stage].keys()
            and all(np.array_equal(one[stage][name], other[stage][name], equal_nan=True) for name in one[stage])
            for one, other in pairs
            for stage in ("local_loss", "params")
        )


def places(evidence: Evidence) -> Places:
    """Return where each stage first differs; in a step of several losses, where each loss and each optimizer does."""
    return dict(_places(evidence))


def _places(evidence: Evidence) -> Iterator[tuple[str, Located]]:
    first = evidence.judgement.first
    if not evidence.facts.multi_loss:
        located = differing_update(evidence)[0]
        found = first | ({} if located is None else {"update": located})
        yield from ((stage.removeprefix("own_"), located) for stage, located in found.items())
        return
    yield from ((f"local_loss:{located.tensor}", located) for located in differing_losses(evidence))
    yield from ((f"update:{number}", located) for located, number in differing_updates(evidence))
    yield from ((stage, first[stage]) for stage in ("samples", "gradients", "buffers") if stage in first)
