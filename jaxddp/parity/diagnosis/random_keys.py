"""Find draws of a port's jax loss that give the same numbers again, where torch's do not.

A check hands both sides the same numbers, so that their masks are equal whatever the port's keys are.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxddp.parity.cases import PortCase
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.findings import Problem
from jaxddp.parity.jax_side.draw_keys import DrawKeys, KeyedDraw
from jaxddp.parity.port.draws import Draw, DrawnSource
from jaxddp.parity.torch_side.repeated_draws import RepeatedDraws

UNKNOWN = "The keys of the random numbers were not compared: {}."
GIVE = {False: "give the loss a `key`", True: "draw from the `key` that the loss is given"}


def repeated_keys(evidence: Evidence, searches: InterruptibleSearches) -> tuple[str, ...]:
    """Return a sentence for each draw that jax makes again with the same numbers, and torch with new ones."""
    case, problems = evidence.case, list[Problem]()
    if not (isinstance(case, PortCase) and isinstance(case.source, DrawnSource)) or evidence.facts.multi_loss:
        return ()
    source = case.source
    again = searches.run(lambda: searches.workers.torch.do(RepeatedDraws(source))[0], problems)
    keyed = searches.run(lambda: searches.workers.jax.do(DrawKeys(case, source.source)), problems)
    if again is None or keyed is None:
        return (UNKNOWN.format("; ".join(f"{problem}" for problem in problems) or "the check was ended"),)
    draws, asks = keyed
    return tuple(dict.fromkeys(sentences(draws, again, asks)))


def sentences(draws: Sequence[KeyedDraw], again: Sequence[bool], asks: bool) -> Iterator[str]:
    """Yield a sentence for each draw that repeats itself.

    Args:
        draws: draws of jax's loss with their keys, (steps, micro-batches, replicas, ...).
        again: whether each draw of torch's loss, in the same order, repeats itself from step to step.
        asks: whether jax's loss asks for a `key`.

    >>> keys = np.zeros((3, 1, 2, 2), np.uint32)
    >>> print(*sentences([KeyedDraw("bernoulli", (4, 8), None, keys)], [False], False))
    jax draws a bernoulli (4, 8) from a constant key: one mask for all steps and replicas; give the loss a `key`.
    """
    for k, draw in enumerate(draws):
        if k < len(again) and again[k]:
            continue
        at = f" at {draw.line}" if draw.line else ""
        name = "mask" if draw.kind == "bernoulli" else "set of numbers"
        of = f"jax draws {Draw(draw.kind, draw.shape)}{at}"
        first = next((j for j in range(k) if _is_same(draws[j], draw)), None)
        if _equal(draw.keys[:1], draw.keys) and len(draw.keys) > 1:
            replicas = " and replicas" if _equal(draw.keys[:, :, :1], draw.keys) else ""
            yield f"{of} from a constant key: one {name} for all steps{replicas}; {GIVE[asks]}."
        elif (step := _repeated(draw.keys)) is not None:
            yield f"{of} from the same key in steps {step} and {step + 1}: one {name} for both; {GIVE[asks]}."
        elif draw.keys.shape[1] > 1 and _equal(draw.keys[:, :1], draw.keys):
            yield f"{of} from the same key in all micro-batches of a step: one {name} for all; {GIVE[asks]}."
        elif first is not None:
            line = f" at {draws[first].line}" if draws[first].line else ""
            yield f"{of} from the key of an earlier draw{line}: the same numbers; split the key."


def _equal(some: np.ndarray, every: np.ndarray) -> bool:
    return bool((some == every).all())


def _repeated(keys: np.ndarray) -> int | None:
    """Return the first step, from 1, whose keys the next step has again; None: there is none."""
    return next((step for step in range(1, len(keys)) if np.array_equal(keys[step - 1], keys[step])), None)


def _is_same(earlier: KeyedDraw, draw: KeyedDraw) -> bool:
    """Return whether two draws give the same numbers."""
    return (earlier.kind, earlier.shape) == (draw.kind, draw.shape) and np.array_equal(earlier.keys, draw.keys)
