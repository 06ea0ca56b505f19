"""Comparison of the initial weights that both models of a port draw; the check itself copies torch's to both sides."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxddp.errors import count, listed
from jaxddp.parity.cases import PortCase
from jaxddp.parity.compare.initialisation import (
    MOST_ERRORS,
    SIDES,
    InitialDifference,
    are_constants,
    differences,
    is_one_sample,
    varies,
)
from jaxddp.parity.compare.initialisers import described, fitting_initialiser
from jaxddp.parity.coverage import Aspect
from jaxddp.parity.initial_draws import DrawnTensor, draws_for
from jaxddp.parity.jax_side.initial_weights import JaxInitialWeights
from jaxddp.parity.port import PortFile
from jaxddp.parity.port.draws import DrawnSource
from jaxddp.parity.port.replaced_files import Texts
from jaxddp.parity.runs import Runs
from jaxddp.parity.torch_side.initial_weights import TorchInitialWeights

Draws = Mapping[str, DrawnTensor]
NONE = "The port's weights are all 0 before torch's are copied to them: it has no initialisation to compare."


class InitialWeights(NamedTuple):
    """Draws of both models' weights, by torch's names, and the names of torch's parameters."""

    torch: Draws
    jax: Draws
    parameters: Collection[str]


def initialisation(runs: Runs) -> Aspect | None:
    """Compare how both models of a port draw their weights; None for a built-in model, or if the runs have failed.

    The verdict of a check does not depend on it.
    """
    if not isinstance(runs.case, PortCase) or runs.problems or not len(runs.jax):
        return None
    weights = initial_weights(runs, runs.case)
    if isinstance(weights, str):
        return Aspect("not compared", (f"The initialisation was not compared: {weights}.",))
    return compared(*weights)


def initial_weights(runs: Runs, case: PortCase, texts: Texts | None = None) -> InitialWeights | str:
    """Draw the weights of both models of a case; return why there are none if a side fails.

    Args:
        runs: the runs of the check.
        case: their case.
        texts: edited texts of a program, and of the files next to it.
    """
    source, number = case.source, draws_for(runs.elements)
    source = source.source if isinstance(source, DrawnSource) else source
    if texts is not None:
        assert isinstance(source, PortFile), "only files are edited"
        edited = replace(source, texts=(*texts.items(),))
        drawn = replace(case.source, source=edited) if isinstance(case.source, DrawnSource) else edited
        source, case = edited, replace(case, source=drawn)
    jax = JaxInitialWeights(case, source, number, runs.seed)
    answers = runs.both(jax, TorchInitialWeights(source, number, runs.seed, tuple(runs.summands)))
    if isinstance(answers, str):
        return answers
    of_jax, (of_torch, parameters) = answers
    return InitialWeights(of_torch, of_jax, parameters)


def compared(torch: Draws, jax: Draws, parameters: Collection[str]) -> Aspect:
    """Compare draws of both sides; see `differences`."""
    drawn = [name for name in jax if name in torch and varies(torch[name])]
    if drawn and not any(jax[name].values.any() for name in drawn):
        return Aspect("not compared", (NONE,))
    remarks = tuple(_on_samples(torch, jax, parameters))
    differing = [*differences(torch, jax, parameters)]
    if not differing:
        return Aspect("equal", remarks)
    worst = max(differing, key=lambda difference: np.nan_to_num(difference.errors, nan=-1.0))
    names = len({difference.tensor for difference in differing})
    first = f"From the same weights: {count(names, 'tensor')} {'is' if names == 1 else 'are'} initialised otherwise."
    allowed = math.nan if math.isnan(worst.errors) else MOST_ERRORS
    says = (first, *_sentences(differing, torch, jax), *remarks)
    return Aspect("differs", says, worst.errors, 0, allowed, worst.tensor)


def _on_samples(torch: Draws, jax: Draws, parameters: Collection[str]) -> Iterator[str]:
    """Yield a sentence on each side that was judged by one sample of a tensor."""
    both = [(torch[name], jax[name]) for name in jax if name in torch and name in parameters]
    unequal = [pair for pair in both if not are_constants(*pair)]
    for place, side in enumerate(SIDES):
        if number := sum(is_one_sample(pair[place]) for pair in unequal):
            yield f"{side}: one sample of {count(number, 'tensor')} was judged, since no seed or key reaches it."


def _sentences(differing: Sequence[InitialDifference], torch: Draws, jax: Draws) -> Iterator[str]:
    """Yield a sentence for each group of tensors that both sides draw alike."""
    groups: dict[tuple[str, ...], list[tuple[InitialDifference, str]]] = {}
    for difference in differing:
        key, says = _words(difference, torch, jax)
        groups.setdefault(key, []).append((difference, says))
    for group in groups.values():
        difference, says = group[0]
        others = f" and {count(len(group) - 1, 'other')}" if len(group) > 1 else ""
        yield f"{difference.tensor}{others}: {says}."


def _words(difference: InitialDifference, torch: Draws, jax: Draws) -> tuple[tuple[str, ...], str]:
    """Return what is said of a difference, after what tensors of one group have in common."""
    name = difference.tensor
    if difference.kind == "alike":
        opposite = SIDES[1 - SIDES.index(difference.side)]
        equal = listed(difference.others, joint=", ")
        return ("alike", difference.side), f"starts equal to {equal} in {difference.side}, and not in {opposite}"
    if difference.kind == "one_key":
        equal = listed(difference.others, joint=", ")
        says = f"has the random numbers of {equal} times a factor, only in {difference.side}: drawn with one key"
        return ("one_key", name), says
    if difference.kind == "elements":
        where = f"is a constant only in {difference.side}" if difference.side else "has other constants"
        return ("elements", name), f"row {difference.row} {where}"
    if difference.kind == "row":
        return ("row", name), f"row {difference.row} is drawn otherwise"
    if difference.kind == "constant" and any(map(is_one_sample, (torch[name], jax[name]))):
        return ("table",), "the tables differ"
    sides = [described(side, name, tensors) for side, tensors in zip(SIDES, (torch, jax), strict=True)]
    fitting = fitting_initialiser(sides[0], torch[name], jax[name])
    says = "; ".join(f"{side} {one.says}" for side, one in zip(SIDES, sides, strict=True))
    if fitting and fitting != sides[1].flax:
        says = f"{says}; {fitting} would do"
    elif sides[0].says == sides[1].says:
        says = f"{says}, of another shape"
    return (*(side.family for side in sides), str(bool(fitting))), says
