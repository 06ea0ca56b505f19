"""Score of the check on faults outside of its catalogue: the right words, the right place, and the lines of both files.

A fault and the words that are right for it are data of tests/faults/outside, which shares no code with the check.
"""

import importlib
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxddp.parity.checking import check
from jaxddp.parity.findings import Difference
from jaxddp.parity.report.sentences import sentences
from jaxddp.parity.workers import Workers

INPUT_EQUAL = 1e-11  # residual of a layer's input below which the layer itself differs


@dataclass(frozen=True)
class Place:
    """Place of a difference; the names are torch's.

    Attributes:
        stage, step, tensor: as in `jaxddp.parity.findings.Difference`.
        layer: first layer whose output differs; "" if none is known.
        before: last layer whose output is equal, if the fault may be between it and `layer`.
        detail: further words of the check.
    """

    stage: str
    step: int
    tensor: str
    layer: str = ""
    before: str = ""
    detail: str = ""

    @classmethod
    def of(cls, difference: Difference) -> "Place":
        """Return the place of a difference."""
        layer = difference.layer
        before = ""
        if layer is not None and (layer.input_residual is None or layer.input_residual > INPUT_EQUAL):
            before = layer.before
        found = difference.stage, difference.step, difference.tensor
        return cls(*found, layer.torch if layer else "", before, difference.detail)

    @property
    def between(self) -> bool:
        """Return whether the fault may be anywhere between two layers, and so in any of several calls."""
        return bool(self.before)

    def names(self, expected: str) -> bool:
        """Return whether a regular expression is found in the layers, or, where there are none, in the tensor."""
        words = (self.layer, self.before) if self.layer else (self.tensor, self.detail)
        return re.search(expected, " ".join(words)) is not None

    def __str__(self) -> str:
        layer = f"{self.before} to {self.layer}" if self.before else self.layer
        return " ".join(filter(None, [self.stage, str(self.step), self.tensor, layer]))


@dataclass(frozen=True)
class OutsideScore:
    """Result of the check on a port with a fault outside of the catalogue.

    Attributes:
        label: name of the fault.
        fault: `tests.faults.outside.OutsideFault`.
        verdict: verdict of the report.
        said: for each difference, the words of its cause; "" if unexplained.
        places: for each difference, where it was found.
        text: the report.
        seconds: duration of the check.
        problems: problems of the report.
        patches: for each difference, the verdict of its patch: "equal", "gone" or "none".
    """

    label: str
    fault: Any
    verdict: str
    said: tuple[str, ...]
    places: tuple[Place, ...]
    text: str
    seconds: float
    problems: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        """Return whether the verdict is "different"."""
        return self.verdict == "different"

    @property
    def in_stage(self) -> bool:
        """Return whether the first difference is in the stage and step in which the fault first shows."""
        return bool(self.places) and (self.places[0].stage, self.places[0].step) == (self.fault.stage, self.fault.step)

    @property
    def named(self) -> bool:
        """Return whether a cause has all expected words, and no other cause is given."""
        return any(map(self.fault.named_by, self.said)) and not self.wrong

    @property
    def wrong(self) -> bool:
        """Return whether a cause lacks expected words."""
        return any(words and not self.fault.named_by(words) for words in self.said)

    @property
    def patchable(self) -> bool:
        """Return whether the fault is named, and is in the model, the loss, the optimizer or its schedule."""
        return self.named and self.fault.stage != "samples"

    @property
    def patched(self) -> bool:
        """Return whether a patch makes both sides equal."""
        return bool(self.patches) and self.patches[-1] == "equal"

    @property
    def located(self) -> bool:
        """Return whether the fault is named, or a difference is in its layer, tensor or call."""
        return self.named or any(place.names(self.fault.place) and not place.between for place in self.places)

    @property
    def near(self) -> bool:
        """Return whether the fault is located, or is between two layers of which one is the fault's."""
        return self.located or any(place.names(self.fault.place) for place in self.places)

    @property
    def lines(self) -> tuple[bool, bool]:
        """Return whether the report has the line of the JAX file, and that of the torch file."""
        jax, torch = (
            re.search(rf"{re.escape(file)}\W+(line )?{number}\b", self.text) is not None
            for file, number in zip(self.fault.files, self.fault.lines, strict=True)
        )
        return jax, torch


def score_outside(label: str, fault: Any, workers: Workers) -> OutsideScore:
    """Write the port with the fault to a temporary folder, check it, and score the report."""
    faults = fault_module()
    with tempfile.TemporaryDirectory(prefix="jaxddp-outside-") as folder:
        path = faults.write_port(fault, Path(folder))
        settings = {"world_size": faults.WORLD_SIZE, "steps": faults.STEPS[fault.port]}
        report = check(path, **settings, numerics=False, workers=workers, tell=lambda line: None, patch=True)
    said = tuple("; ".join(sentences(one.cause)) if one.cause else "" for one in report.differences)
    places = tuple(map(Place.of, report.differences))
    problems = tuple(map(str, report.problems))
    patches = tuple(one.patch.verdict for one in report.differences if one.patch)
    return OutsideScore(label, fault, report.verdict, said, places, str(report), report.seconds, problems, patches)


def fault_module() -> Any:
    """Return `tests.faults.outside`, which only a checkout of the repository has."""
    return importlib.import_module("tests.faults.outside")


def counts(scores: Sequence[OutsideScore]) -> str:
    """Return the numbers of faults found, named, named wrongly and located, and of lines found."""
    found, named, wrong, located, near = (
        sum(getattr(score, name) for score in scores) for name in ("found", "named", "wrong", "located", "near")
    )
    both = sum(all(score.lines) for score in scores)
    words = f"{found} found, {named} named, {wrong} named wrongly, {located} named or located"
    return f"{words}, {near - located} more between two layers, {both} with the lines of both files"


def counts_of_patches(scores: Sequence[OutsideScore]) -> str:
    """Return the number of named faults that a patch removes, after which nothing differs."""
    patched = sum(score.patched for score in scores if score.patchable)
    others = sum(score.patched for score in scores if score.fault.stage != "samples" and not score.named)
    return f"{patched} with a patch after which both sides are equal; of those without a right name {others}"
