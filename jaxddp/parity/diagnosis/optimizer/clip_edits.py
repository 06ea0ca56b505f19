"""Mistakes in clipping that only the port's updates show."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import methodcaller

import numpy as np

from jaxddp.parity.diagnosis.optimizer.edit import OptimizerEdit, discrete
from jaxddp.parity.diagnosis.optimizer.program import OptimizerProgram
from jaxddp.parity.diagnosis.optimizer.sample import Sample
from jaxddp.parity.diagnosis.search.nonlinear_fit import Unknown
from jaxddp.parity.diagnosis.wrong_clipping import ClippingFault, at_norm, by_value, wrong_clipping

NORMS = (0.1, 0.5, 1.0, 5.0)  # starts of the search for a norm
VALUES = (0.01, 0.1, 1.0)


def clip_edits(program: OptimizerProgram, sample: Sample, world_size: int) -> Iterator[OptimizerEdit]:
    """Yield alternative clipping rules: another max norm, by value, and, if the reference clips, none.

    Args:
        program: the reference's program.
        sample: sample of the gradients.
        world_size: number of replicas.
    """
    reference = program.clipping
    start = reference.max_norm or float(np.median(program.norms))
    for epsilon in (reference.epsilon, 0.0) if reference.max_norm is None else (reference.epsilon,):  # 0 as in optax
        # A norm that is never reached clips nothing.
        norms = Unknown((start, *NORMS), "log", low=1e-12, high=program.norms.max())
        at = partial(at_norm, epsilon=epsilon, reference=reference)
        yield _fitted(at, norms, "clip_missing", "clip_norm_local")
    for one, fields in wrong_clipping(reference, world_size):
        never_clips = np.all(replace(reference, **fields).factor(program.norms) == 1.0)
        if one.kind != "clip_norm_local" or not never_clips:
            clipped = methodcaller("with_clipping", **fields)
            yield discrete(one.kind, one.says, clipped, *one.values, removes=one.kind == "clip_missing")
    sizes = np.abs(sample.gradients / program.clipped[: len(sample.gradients), None])
    starts = tuple(float(x) for x in np.quantile(sizes, (0.5, 0.9, 0.99)) if x > 0)
    values = Unknown((*VALUES, *starts), "log", low=1e-12, high=float(sizes.max()))
    others = "clip_norm", "clip_missing", "clip_norm_local", "clip_epsilon"
    yield _fitted(partial(by_value, reference=reference), values, *others)


def _fitted(wrong: Callable[[float], ClippingFault], unknown: Unknown, *excludes: str) -> OptimizerEdit:
    return OptimizerEdit(
        wrong(1.0).deviation.kind,
        lambda program, v: program.with_clipping(**wrong(v[0]).fields),
        lambda v: wrong(v[0]).deviation.says,
        (unknown,),
        frozenset(excludes),
        values=lambda v: wrong(v[0]).deviation.values,
    )
