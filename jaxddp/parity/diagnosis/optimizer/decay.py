"""Mistakes in weight decay: its value, its kind, the tensors to which it applies."""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any

import numpy as np

from jaxddp.parity.deviation import Statement, Value, first_names, number
from jaxddp.parity.diagnosis.optimizer.edit import OptimizerEdit, both, discrete, extent
from jaxddp.parity.diagnosis.optimizer.program import OptimizerProgram
from jaxddp.parity.diagnosis.optimizer.sample import Sample
from jaxddp.parity.diagnosis.optimizer.stock_step import StockStep
from jaxddp.parity.diagnosis.optimizer.trace_edits import (
    DECAY,
    adds_decay_to_gradient,
    coupled,
    decay_last,
    decay_without_rate,
    decoupled,
)
from jaxddp.parity.diagnosis.search.nonlinear_fit import Unknown

NORMS = ("norm", "bn", "ln")  # in the names of normalisation layers
EMBEDDINGS = ("emb", "wte", "wpe")  # in the names of embeddings
SENSELESS = 2.0  # no weight decay is that large
MATRICES = "matrices"


def decay_edits(program: OptimizerProgram, sample: Sample) -> Iterator[OptimizerEdit]:
    """Yield every mistake in weight decay; the sample shows which tensors may decay."""
    if DECAY not in program.options:
        return
    if decay_of(program).any():
        yield from _mask(program, sample)
        yield from _value(program)
        yield from _kind(program)
    else:
        yield from _from_nothing(program)


def _value(program: OptimizerProgram) -> Iterator[OptimizerEdit]:
    yield OptimizerEdit(
        "decay_value",
        lambda r, v: with_decay(r, np.where(decay_of(r) > 0, v[0], 0.0)),
        lambda v: Statement("decay", jax=v[0], torch=extent(decay_of(program)[decay_of(program) > 0])),
        (Unknown((float(decay_of(program).max()), 1e-4), unit=1e-2, high=SENSELESS),),
        values=lambda v: both(v[0], decay_of(program)[decay_of(program) > 0], program.kind, DECAY),
    )


def _from_nothing(program: OptimizerProgram) -> Iterator[OptimizerEdit]:
    """Yield decay where the reference has none: of either kind, on all tensors or on some."""
    for is_coupled, (reach, mask) in itertools.product(
        (False, True), _distinct(_reaches(program), [decay_of(program)[0] > 0])
    ):
        yield _some(is_coupled, reach, mask)


def _some(is_coupled: bool, reach: str, mask: np.ndarray) -> OptimizerEdit:
    return OptimizerEdit(
        "decay_value",
        lambda r, v: _of_kind(with_decay(r, np.where(mask, v[0], 0.0)), is_coupled),
        lambda v: Statement("decay_only_in_port", jax=v[0], is_coupled=is_coupled, reach=reach),
        (Unknown((1e-4, 1e-2), unit=1e-2, high=SENSELESS),),
        values=lambda v: (Value(number(v[0]), key=DECAY),),
    )


def _kind(program: OptimizerProgram) -> Iterator[OptimizerEdit]:
    yield discrete(
        "coupled_decay",
        Statement("kind_of_decay", is_coupled=not couples(program)),
        partial(_of_kind, is_coupled=not couples(program)),
    )
    if not couples(program) or program.kind == "SGD":  # others divide an L2 penalty by the size of the gradients
        yield discrete("decay_rounded_away", Statement("decay_rounded"), _rounded)
    for rate in (1.0, -1.0):
        yield discrete(
            "decay_without_lr",
            Statement("decay_without_rate", is_added=rate < 0),
            partial(OptimizerProgram.with_edit, edit=decay_without_rate(rate)),
        )
    yield discrete("call_moved", Statement("decay_after_update"), partial(OptimizerProgram.with_edit, edit=decay_last))


def _rounded(program: OptimizerProgram) -> OptimizerProgram:
    """Apply decay as a factor of the parameters, 1 - lr decay, rounded to float32's 24 bits."""
    product = program.lr.astype(np.float32) * decay_of(program).astype(np.float32)
    lost = 1 - (np.float32(1) - product).astype(np.float64)
    decay = np.divide(lost, program.lr, out=np.zeros_like(lost), where=program.lr > 0)
    return _of_kind(with_decay(program, decay), is_coupled=False)


def decay_of(program: OptimizerProgram) -> np.ndarray:
    """Return the weight decay of each step and tensor, (S, T)."""
    return program.options[DECAY]


def with_decay(program: OptimizerProgram, decay: np.ndarray) -> OptimizerProgram:
    """Return the program with another weight decay, broadcast to (S, T)."""
    return program.with_options(**{DECAY: decay})


def couples(program: OptimizerProgram) -> bool:
    """Return whether the program adds its decay to the gradients, as an L2 penalty."""
    return _couples(program.kind, tuple(program.options), tuple(program.flags.items()))


@lru_cache
def _couples(kind: str, options: tuple[str, ...], flags: tuple[tuple[str, Any], ...]) -> bool:
    numbers = dict.fromkeys(("lr", *options), 0.5)
    return adds_decay_to_gradient(StockStep(kind, numbers, dict(flags)).first(numbers))


def _of_kind(program: OptimizerProgram, is_coupled: bool) -> OptimizerProgram:
    """Return the program with its decay as an L2 penalty, or decoupled."""
    if couples(program) == is_coupled:
        return program
    return program.with_edit(coupled if is_coupled else decoupled)


def _mask(program: OptimizerProgram, sample: Sample) -> Iterator[OptimizerEdit]:
    decayed = decay_of(program)[0] > 0
    masks = [*_reaches(program), *_toggled(program, decayed), _apparent_reach(program, decayed, sample)]
    for reach, mask in _distinct(masks, [decayed, np.zeros_like(decayed)]):  # decay on nothing is another value: 0
        also, lacking = names_of(program, mask & ~decayed), names_of(program, decayed & ~mask)
        what = Statement("decay_mask", reach=reach, also=also, lacking=lacking)
        detail = first_names(also) if reach == MATRICES else ""
        yield discrete("decay_mask", what, partial(_masked, mask=mask), detail=detail)


def _distinct(masks: Iterable[tuple[str, np.ndarray]], seen: list[np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each mask once, with its first key, and skip masks that were seen before."""
    for reach, mask in masks:
        if not any((mask == other).all() for other in seen):
            seen.append(mask)
            yield reach, mask


def names_of(program: OptimizerProgram, tensors: np.ndarray) -> tuple[str, ...]:
    """Return the names of the tensors in a mask.

    If tensors whose names differ only in integers, blocks.0.bias and blocks.1.bias, are all in, list blocks.*.bias.
    """
    patterns = [re.sub(r"\b[0-9]+\b", "*", name) for name in program.names]
    left_out = {pattern for pattern, chosen in zip(patterns, tensors, strict=True) if not chosen}
    of_each = zip(program.names, patterns, tensors, strict=True)
    alone = {pattern for pattern, count in Counter(patterns).items() if count == 1} | left_out
    return (*dict.fromkeys(name if pattern in alone else pattern for name, pattern, chosen in of_each if chosen),)


def _masked(program: OptimizerProgram, mask: np.ndarray) -> OptimizerProgram:
    return with_decay(program, np.where(mask, decay_of(program).max(axis=1, keepdims=True), 0.0))


def _kinds(program: OptimizerProgram) -> dict[str, np.ndarray]:
    """Return kinds of tensors as masks.

    A norm has a one-dimensional scale, or a name that says so. Its bias counts both as a norm's and as a bias.
    """
    flat = {name for name, shape in zip(program.names, program.shapes, strict=True) if len(shape) == 1}
    scales = {name for name in flat if not name.endswith("bias")}
    layers = {name.rpartition(".")[0] for name in scales}

    def mask(chosen: Callable[[str], bool]) -> np.ndarray:
        return np.array([chosen(name) for name in program.names])

    def is_norm(name: str) -> bool:
        return (name in flat and name.rpartition(".")[0] in layers) or any(norm in name.lower() for norm in NORMS)

    return {
        "biases": mask(lambda name: name.endswith("bias")),
        "norms": mask(is_norm),
        "other_biases": mask(lambda name: name.endswith("bias") and not is_norm(name)),
        "embeddings": mask(lambda name: name not in flat and any(word in name.lower() for word in EMBEDDINGS)),
    }


def _reaches(program: OptimizerProgram) -> Iterator[tuple[str, np.ndarray]]:
    """Yield common choices of tensors that decay, as a key and a mask."""
    kinds = _kinds(program)
    matrices = np.array([len(shape) > 1 for shape in program.shapes])
    yield "all", np.ones(len(program.names), bool)
    yield MATRICES, matrices
    yield from ((f"all_but_{kind}", ~mask) for kind, mask in kinds.items())
    yield "all_but_biases_and_norms", ~(kinds["biases"] | kinds["norms"])
    yield "all_but_biases_norms_and_embeddings", ~(kinds["biases"] | kinds["norms"] | kinds["embeddings"])
    yield "vectors", ~matrices


def _toggled(program: OptimizerProgram, decayed: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the reference's choice with one kind of tensors added or left out."""
    for mask in _kinds(program).values():
        yield from (("", changed) for changed in (decayed | mask, decayed & ~mask))


def _apparent_reach(program: OptimizerProgram, decayed: np.ndarray, sample: Sample) -> tuple[str, np.ndarray]:
    """Return the mask of tensors whose update is nearer to an update with decay than to one without."""
    most = np.broadcast_to(decay_of(program).max(axis=1, keepdims=True), decay_of(program).shape)
    decaying, still = (
        sample.of_tensors(sample.misfit(with_decay(program, decay))).max(axis=0) for decay in (most, 0 * most)
    )
    return "", np.where(decaying == still, decayed, decaying < still)
