"""Faults of an optimizer as edits of the reference's recipe, one mistake each."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from jaxddp.parity.compare.patterns import scaled
from jaxddp.parity.diagnosis.optimizer.clipping import clip_edits
from jaxddp.parity.diagnosis.optimizer.decay import decay_edits
from jaxddp.parity.diagnosis.optimizer.edit import OptimizerEdit, discrete, number, numbers, typical
from jaxddp.parity.diagnosis.optimizer.fit import Unknown, Values
from jaxddp.parity.diagnosis.optimizer.recipes import STATE, OptimizerRecipe
from jaxddp.parity.diagnosis.optimizer.sample import Sample
from jaxddp.parity.diagnosis.optimizer.update_evidence import OptimizerEvidence
from jaxddp.parity.diagnosis.optimizer.warmup import warmup_edits

PARTS = {"mean": "means of gradients", "square": "means of squares", "buffer": "momentum", "largest": "largest squares"}
EPS_STARTS = (1e-12, 1e-10, 1e-8, 1e-6, 1e-4)


def edits(recipe: OptimizerRecipe, sample: Sample, evidence: OptimizerEvidence) -> list[OptimizerEdit]:
    """Return all edits that apply to this optimizer, in the order in which they are applied."""
    counts = _counts(evidence.world_size, evidence.accumulation_steps)
    of_any = (
        decay_edits(recipe, sample),
        _rate(recipe, counts),
        warmup_edits(recipe),
        _scale(recipe, counts, evidence.sizes),
        clip_edits(recipe, sample, evidence.world_size),
        _unused(recipe),
        _restore(recipe),
    )
    of_family = (make(recipe) for make in OF_FAMILY[recipe.family])
    return list(itertools.chain(*of_any, *of_family))


def _counts(replicas: int, micro_batches: int) -> dict[int, str]:
    """Return the counts above 1 that may scale a run, each with a description.

    >>> _counts(2, 4)
    {8: 'replicas times micro-batches', 4: 'the number of micro-batches', 2: 'the number of replicas'}
    """
    counts = {
        replicas * micro_batches: "replicas times micro-batches",
        micro_batches: "the number of micro-batches",
        replicas: "the number of replicas",
    }
    return {count: what for count, what in counts.items() if count > 1}


def _rate(recipe: OptimizerRecipe, counts: dict[int, str]) -> Iterator[OptimizerEdit]:
    factors: dict[float, str] = {}
    for count, what in counts.items():
        root = math.sqrt(count)
        factors |= {root: f"times {number(root)}, the root of {what}"}
        factors |= {1 / root: f"divided by {number(root)}, the root of {what}"}
    for count, what in counts.items():
        factors |= {float(count): f"times {count}, {what}", 1.0 / count: f"divided by {count}, {what}"}
    yield OptimizerEdit(
        "lr_scaled",
        lambda r, v: replace(r, factor=v[0]),
        lambda v: f"learning rate {factors.get(v[0], f'times {number(v[0])}')}",
        (Unknown((1.0,), low=1e-6, likely=tuple(factors)),),
        # SGD's update is linear in the gradients.
        frozenset({"loss_scale"} if recipe.family == "sgd" else ()),
    )
    if not recipe.scheduled:
        return
    for shift, where in ((1, "ahead"), (-1, "behind")):
        yield discrete("lr_off_by_one", f"the schedule is one step {where}", partial(_reindexed, shift=shift))
    for speed, what in counts.items():
        yield discrete(
            "scheduler_too_fast",
            f"the schedule advances {speed} times per step, {what}",
            partial(_reindexed, speed=speed),
        )


def _reindexed(recipe: OptimizerRecipe, speed: int = 1, shift: int = 0) -> OptimizerRecipe:
    return replace(recipe, index=recipe.index * speed + shift)


def _scale(recipe: OptimizerRecipe, counts: dict[int, str], sizes: Mapping[int, str]) -> Iterator[OptimizerEdit]:
    likely = {2.0**power for power in range(-24, 25)}
    likely |= {factor for n in (*counts, *sizes) for factor in (float(n), 1.0 / n)}
    if recipe.family == "sgd":
        # Another learning rate has the same effect, so only a scale that a programmer would use counts.
        unknown, same = Unknown((1.0,), low=1e-6, digits=0), "lr_scaled"
    else:
        unknown, same = Unknown((1.0, 1e-4, 1e-2, 1e2, 1e4, 1e6), "log", low=1e-12), "eps_value"
    yield OptimizerEdit(
        "loss_scale",
        lambda r, v: replace(r, scale=r.scale * v[0]),
        lambda v: scaled("the optimizer sees gradients times", v[0], sizes),
        (replace(unknown, likely=tuple(likely)),),
        frozenset({same}),
    )


def _unused(recipe: OptimizerRecipe) -> Iterator[OptimizerEdit]:
    if not recipe.used.all():
        steps = np.arange(1, len(recipe.count) + 1)[:, None]
        yield discrete(
            "unused_parameters",
            "parameters without a gradient are updated as if it were 0",
            lambda r: replace(r, used=np.ones_like(r.used), count=np.broadcast_to(steps, r.count.shape)),
        )


def _restore(recipe: OptimizerRecipe) -> Iterator[OptimizerEdit]:
    at = recipe.restored_at
    if at is None or not 0 < at < len(recipe.index):
        return
    kept = ["largest"] if not recipe.amsgrad else []
    kept += ["mean"] if recipe.family == "rmsprop" and not recipe.centred else []
    kept += ["buffer"] if not recipe.first.any() else []
    losable = {part: PARTS[part] for part in STATE[recipe.family] if part not in kept}
    losable |= {"count": "count"} if recipe.family == "adam" or recipe.rate_decay.any() else {}
    losable |= {"schedule": "position in the schedule"} if recipe.scheduled else {}
    for size in range(1, len(losable) + 1):
        for lost in itertools.combinations(losable, size):
            yield discrete(
                "resume_lost_state",
                f"restoring after step {at} loses {', '.join(losable[part] for part in lost)}",
                partial(_losing, at=at, lost=frozenset(lost)),
            )


def _losing(recipe: OptimizerRecipe, at: int, lost: frozenset[str]) -> OptimizerRecipe:
    index, count = recipe.index.copy(), recipe.count.copy()
    if "schedule" in lost:
        index[at:] -= at
    if "count" in lost:
        count[at:] -= count[at - 1]
    return replace(recipe, index=index, count=count, lost=lost)


def _eps(recipe: OptimizerRecipe) -> Iterator[OptimizerEdit]:
    reference = float(recipe.eps.max())
    yield OptimizerEdit(
        "eps_value",
        lambda r, v: replace(r, eps=np.full_like(r.eps, v[0])),
        lambda v: f"eps {number(v[0])}, the reference has {numbers(recipe.eps)}",
        (Unknown((reference or 1e-8, *EPS_STARTS), "log"),),
        frozenset({"loss_scale"}),
    )
    none = f"eps 0, the reference has {numbers(recipe.eps)}"
    yield discrete("eps_value", none, lambda r: replace(r, eps=np.zeros_like(r.eps)))
    for place, says in (
        ("inside", "inside the root, the reference has it"),
        ("both", "inside the root, too, and not only"),
    ):
        yield discrete("eps_in_root", f"eps is added {says} outside", partial(replace, eps_place=place))


def _momentum(recipe: OptimizerRecipe) -> Iterator[OptimizerEdit]:
    if recipe.family == "adam":
        yield _betas("betas", recipe, {"first": "beta1", "second": "beta2"})
    else:
        yield _betas("betas", recipe, {"first": "momentum"})
    if recipe.family == "rmsprop":
        yield _betas("rmsprop_decay", recipe, {"second": "RMSprop's decay of squares"})
    if recipe.family == "sgd" and recipe.scheduled and recipe.first.any():
        says = "momentum sums updates, each at the learning rate of its step, where the reference sums gradients"
        yield discrete("lr_in_momentum", says, partial(replace, rate_inside=True))
    yield discrete(
        "nesterov",
        f"Nesterov momentum in {'the reference' if recipe.nesterov else 'the port'} only",
        partial(replace, nesterov=not recipe.nesterov),
    )


def _betas(fault: str, recipe: OptimizerRecipe, fields: dict[str, str]) -> OptimizerEdit:
    """Return an edit with other values for some fields of the recipe.

    Args:
        fault: a name of `catalogue.FAULTS`.
        recipe: the reference's.
        fields: field of the recipe -> its name in messages.
    """
    references = {field: getattr(recipe, field) for field in fields}

    def change(recipe: OptimizerRecipe, values: Values) -> OptimizerRecipe:
        filled: dict[str, Any] = {
            f: np.full(recipe.count.shape, value) for f, value in zip(fields, values, strict=True)
        }
        return replace(recipe, **filled)

    def says(values: Values) -> str:
        named = zip(fields.values(), values, references.values(), strict=True)
        return " and ".join(
            f"{name} {number(value)}, the reference has {numbers(reference)}"
            for name, value, reference in named
            if not np.allclose(reference, value, rtol=0, atol=1e-9)
        )

    starts = ((typical(reference), 0.9) for reference in references.values())
    return OptimizerEdit(fault, change, says, tuple(Unknown(start, "complement", high=1.0) for start in starts))


def _dampening(recipe: OptimizerRecipe) -> Iterator[OptimizerEdit]:
    yield _dampened(recipe, False, "")
    yield _dampened(recipe, True, " from the first gradient on")


def _dampened(recipe: OptimizerRecipe, first: bool, when: str) -> OptimizerEdit:
    return OptimizerEdit(
        "dampening",
        # Without momentum, nothing is dampened.
        lambda r, v: replace(r, dampening=np.where(r.first, v[0], 0.0), dampens_first=first),
        lambda v: f"dampening {number(v[0])}{when}, the reference has {numbers(recipe.dampening)}",
        (Unknown((float(recipe.dampening.max()), 0.5), high=1.0),),
    )


def _largest(recipe: OptimizerRecipe) -> Iterator[OptimizerEdit]:
    ways = {
        "": "AMSGrad in the reference only",
        "torch": "AMSGrad in the port only",
        "corrected": "AMSGrad's largest of the corrected squares, as optax has it",
    }
    for way, says in ways.items():
        if way != recipe.amsgrad:
            yield discrete("amsgrad", says, partial(replace, amsgrad=way))


def _correction(recipe: OptimizerRecipe) -> Iterator[OptimizerEdit]:
    yield discrete("no_bias_correction", "Adam without bias correction", partial(replace, corrects=False))


def _squares(recipe: OptimizerRecipe) -> Iterator[OptimizerEdit]:
    yield discrete(
        "rmsprop_centred",
        f"RMSprop is centred in {'the reference' if recipe.centred else 'the port'} only",
        partial(replace, centred=not recipe.centred),
    )
    yield _start("rmsprop_centred", "RMSprop's squares start", recipe)


def _accumulator(recipe: OptimizerRecipe) -> Iterator[OptimizerEdit]:
    yield _start("adagrad_accumulator", "the accumulator starts", recipe)


def _start(fault: str, says: str, recipe: OptimizerRecipe) -> OptimizerEdit:
    return OptimizerEdit(
        fault,
        lambda r, v: replace(r, start=np.full_like(r.start, v[0])),
        lambda v: f"{says} from {number(v[0])}, in the reference from {numbers(recipe.start)}",
        # Searched linearly, because the value may be 0.
        (Unknown((1e-3, 0.1, 1.0), unit=0.1),),
    )


OF_FAMILY: dict[str, tuple[Callable[[OptimizerRecipe], Iterator[OptimizerEdit]], ...]] = {
    "sgd": (_momentum, _dampening),
    "adam": (_eps, _momentum, _largest, _correction),
    "rmsprop": (_eps, _momentum, _squares),
    "adagrad": (_eps, _accumulator),
}
