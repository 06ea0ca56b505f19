"""Report non-finite values: the first stage and side where they arise, and what they affect."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxddp.parity.cases import PortCase
from jaxddp.parity.compare.finite import GRADIENTS, NotFinite
from jaxddp.parity.compare.layers import not_finite_layer
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.findings import Difference, Problem
from jaxddp.parity.jax_side.layers import JaxLayers
from jaxddp.parity.records import Records, Scratch
from jaxddp.parity.torch_side.layers import TorchLayers

LOSS = "local_loss"
NAMES = {"optimizer_state": "optimizer's state"}  # other stages keep their names


def on_both_sides(evidence: Evidence, searches: InterruptibleSearches, spoiled: NotFinite) -> Problem:
    """Return the problem of non-finite values on both sides: from their step on, nothing can be compared."""
    if spoiled.stage == LOSS:
        what = f"the loss is not a finite number, nor is jax's; {_arises_in(evidence, searches, spoiled)}"
    else:
        what = f"{_numbers(spoiled)} are not finite, nor are jax's{_loss_is_finite(spoiled)}"
    message = f"{what}; nothing is compared from this step on"
    return Problem("torch", f"step {spoiled.step + 1}", message, leads=True)


def on_one_side(
    evidence: Evidence, searches: InterruptibleSearches, spoiled: NotFinite, differences: Sequence[Difference]
) -> list[Difference]:
    """Return the differences, first that of non-finite values on one side, without those that follow from it.

    Args:
        evidence: records of both sides, compared.
        searches: runs the computation of the loss once more.
        spoiled: place of the non-finite values.
        differences: the differences found without regard to them.
    """
    step = spoiled.step + 1
    same = [one for one in differences if (one.stage, one.step) == (spoiled.stage, step)][:1]
    followers = [one for one in differences if not one.cause and one.step >= step and math.isinf(one.residual)]
    is_loss = spoiled.stage == LOSS
    origin = _arises_in(evidence, searches, spoiled) if is_loss else _loss_is_finite(spoiled).removeprefix("; ")
    allowed = evidence.judgement.allowed(spoiled.stage)
    first = Difference(spoiled.stage, step, spoiled.where, math.inf, allowed)
    first = replace((same or [first])[0], tensor=first.tensor, detail=origin, not_finite=spoiled.side)
    return [first, *(one for one in differences if one not in (*followers, *same))]


def _numbers(spoiled: NotFinite) -> str:
    """Describe the non-finite values.

    >>> _numbers(NotFinite(0, "optimizer_state", "both", ("fc.weight",), False, 0))
    "values of the optimizer's state of fc.weight"
    """
    stage = NAMES.get(spoiled.stage, spoiled.stage.replace("_", " "))
    return (
        f"the {stage} of {spoiled.where}" if spoiled.stage in GRADIENTS else f"values of the {stage} of {spoiled.where}"
    )


def _loss_is_finite(spoiled: NotFinite) -> str:
    return "; the loss is finite, so they arise in its derivative" if spoiled.stage == GRADIENTS[0] else ""


def _arises_in(evidence: Evidence, searches: InterruptibleSearches, spoiled: NotFinite) -> str:
    """Describe in which layer a non-finite loss arises."""
    scratch = Scratch()
    job = _forward_pass(evidence, searches, spoiled, scratch)
    ran = job is not None and searches.run(lambda: (job(), True), problems=[]) is not None
    if not ran:
        return ""
    layer, is_given = not_finite_layer(Records([scratch.path])[0])
    if is_given:
        return f"the first non-finite value arises before layer {layer}, whose input is not finite"
    return (
        f"the first non-finite value arises in layer {layer}"
        if layer
        else "no layer's output shows it: look in the loss"
    )


def _forward_pass(
    evidence: Evidence, searches: InterruptibleSearches, spoiled: NotFinite, scratch: Scratch
) -> Callable[[], object] | None:
    """Return the job that records the layers of a side with a non-finite loss; None if no job can."""
    case, paths, workers = evidence.case, (evidence.start, evidence.torch_folder, scratch.path), searches.workers
    at = spoiled.step, spoiled.rank
    if spoiled.side != "jax":
        return lambda: workers.torch.do(TorchLayers(case.torch_source, *paths, *at, case.world_size))
    return (lambda: workers.jax.do(JaxLayers(case, *paths, *at))) if isinstance(case, PortCase) else None
