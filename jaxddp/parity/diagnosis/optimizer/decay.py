"""Mistakes in weight decay: its value, its kind, the tensors that it applies to."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from jaxddp.parity.diagnosis.optimizer.edit import OptimizerEdit, discrete, number, numbers
from jaxddp.parity.diagnosis.optimizer.fit import Unknown
from jaxddp.parity.diagnosis.optimizer.recipes import OptimizerRecipe
from jaxddp.parity.diagnosis.optimizer.sample import Sample

NORMS = ("norm", "bn", "ln")  # in the names of normalisation layers
SENSELESS = 2.0  # no weight decay is that large
NAMED = 3  # largest number of tensors that are listed by name


def decay_edits(recipe: OptimizerRecipe, sample: Sample) -> Iterator[OptimizerEdit]:
    """Yield every mistake in weight decay; the sample shows which tensors may decay."""
    if recipe.decay.any():
        yield from _mask(recipe, sample)
        yield from _value(recipe)
        yield from _kind(recipe)
    else:
        yield from _from_nothing(recipe)


def _value(recipe: OptimizerRecipe) -> Iterator[OptimizerEdit]:
    yield OptimizerEdit(
        "decay_value",
        lambda r, v: replace(r, decay=np.where(r.decay > 0, v[0], 0.0)),
        lambda v: f"weight decay {number(v[0])}, the reference has {numbers(recipe.decay[recipe.decay > 0])}",
        (Unknown((float(recipe.decay.max()), 1e-4), unit=1e-2, high=SENSELESS),),
    )


def _from_nothing(recipe: OptimizerRecipe) -> Iterator[OptimizerEdit]:
    """Yield decay where the reference has none: of either kind, on all tensors or on matrices only."""
    for coupled, (reach, mask) in itertools.product((False, True), itertools.islice(_reaches(recipe), 2)):
        yield _some(coupled, reach, mask)


def _some(coupled: bool, reach: str, mask: np.ndarray) -> OptimizerEdit:
    kind = "as an L2 penalty" if coupled else "decoupled"
    return OptimizerEdit(
        "decay_value",
        lambda r, v: replace(r, coupled=coupled, decay=np.broadcast_to(np.where(mask, v[0], 0.0), r.decay.shape)),
        lambda v: f"weight decay {number(v[0])}, {kind}, {reach}, where the reference has none",
        (Unknown((1e-4, 1e-2), unit=1e-2, high=SENSELESS),),
    )


def _kind(recipe: OptimizerRecipe) -> Iterator[OptimizerEdit]:
    kinds = ("an L2 penalty, in the reference it is decoupled", "decoupled, in the reference it is an L2 penalty")
    yield discrete(
        "coupled_decay", f"weight decay is {kinds[recipe.coupled]}", partial(replace, coupled=not recipe.coupled)
    )
    yield discrete("decay_rounded_away", "the factor 1 - lr x decay is rounded to float32", _rounded)
    for rate, wrong in ((1.0, ""), (-1.0, ", and is added to the weights")):
        yield discrete(
            "decay_without_lr",
            f"weight decay is not multiplied by the learning rate{wrong}",
            partial(replace, coupled=False, decay_rate=rate),
        )


def _rounded(recipe: OptimizerRecipe) -> OptimizerRecipe:
    """Apply decay as a factor of the parameters, 1 - lr decay, rounded to float32's 24 bits."""
    product = recipe.lr.astype(np.float32) * recipe.decay.astype(np.float32)
    lost = 1 - (np.float32(1) - product).astype(np.float64)
    return replace(
        recipe, coupled=False, decay=np.divide(lost, recipe.lr, out=np.zeros_like(lost), where=recipe.lr > 0)
    )


def _mask(recipe: OptimizerRecipe, sample: Sample) -> Iterator[OptimizerEdit]:
    own = recipe.decay[0] > 0
    seen = [own, np.zeros_like(own)]  # decay on nothing is another value: 0
    for reach, mask in (*_reaches(recipe), _apparent_reach(recipe, own, sample)):
        if not any((mask == other).all() for other in seen):
            seen.append(mask)
            says = f"weight decay acts {reach}, unlike in the reference"
            yield discrete("decay_mask", says, partial(_masked, mask=mask))


def _masked(recipe: OptimizerRecipe, mask: np.ndarray) -> OptimizerRecipe:
    return replace(recipe, decay=np.where(mask, recipe.decay.max(axis=1, keepdims=True), 0.0))


def _reaches(recipe: OptimizerRecipe) -> Iterator[tuple[str, np.ndarray]]:
    """Yield common choices of tensors that decay, in words and as a mask."""
    yield "on all tensors", np.ones(len(recipe.names), bool)
    yield "on tensors with two or more dimensions", np.array([len(shape) > 1 for shape in recipe.shapes])
    yield "on all but biases", np.array([not name.endswith("bias") for name in recipe.names])
    named = [name.endswith("bias") or any(norm in name.lower() for norm in NORMS) for name in recipe.names]
    yield "on all but biases and norms, by name", ~np.array(named)


def _apparent_reach(recipe: OptimizerRecipe, own: np.ndarray, sample: Sample) -> tuple[str, np.ndarray]:
    """Return the mask of tensors whose update is nearer to the one with decay than to the one without."""
    most = np.broadcast_to(recipe.decay.max(axis=1, keepdims=True), recipe.decay.shape)
    decaying, still = (
        sample.of_tensors(sample.misfit(replace(recipe, decay=decay))).max(axis=0) for decay in (most, 0 * most)
    )
    mask = np.where(decaying == still, own, decaying < still)
    other = [name for name, changed in zip(recipe.names, mask != own, strict=True) if changed]
    listed = ", ".join(other[:NAMED]) + (f" and {len(other) - NAMED} more" if len(other) > NAMED else "")
    return f"differently on {listed}", mask
