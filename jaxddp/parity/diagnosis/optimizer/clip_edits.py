"""Mistakes in clipping that only the port's updates show."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from jaxddp.parity.diagnosis import clip_words
from jaxddp.parity.diagnosis.optimizer.edit import OptimizerEdit, discrete
from jaxddp.parity.diagnosis.optimizer.fit import Unknown
from jaxddp.parity.diagnosis.optimizer.program import OptimizerProgram
from jaxddp.parity.diagnosis.optimizer.sample import Sample

NORMS = (0.1, 0.5, 1.0, 5.0)  # starts of the search for a norm


def clip_edits(program: OptimizerProgram, sample: Sample, world_size: int) -> Iterator[OptimizerEdit]:
    """Yield alternative clipping rules: another max norm, by value, and, if the reference clips, none.

    Args:
        program: the reference's program.
        sample: sample of the gradients.
        world_size: number of replicas.
    """
    yield _at_norm(program)
    if program.max_norm is None:
        yield _at_norm(replace(program, clip_epsilon=0.0))  # as in optax
    else:
        yield discrete("clip_missing", clip_words.not_clipped(program.max_norm), partial(replace, max_norm=None))
        yield discrete("clip_epsilon", clip_words.NO_EPSILON, partial(replace, clip_epsilon=0.0))
        for power in (0.5, 1.0) if world_size > 1 else ():
            says = f"clipped by a norm times {world_size**power:.4g}, with {world_size} replicas"
            yield discrete("clip_norm_local", says, partial(replace, norm_scale=world_size**power))
    yield _by_value(program, sample)


def _at_norm(rule: OptimizerProgram) -> OptimizerEdit:
    return OptimizerEdit(
        "clip_norm",
        lambda r, v: replace(r, max_norm=v[0], clip_epsilon=rule.clip_epsilon),
        lambda v: clip_words.at_norm(v[0], rule.max_norm),
        # A norm that is never reached clips nothing.
        (Unknown((rule.max_norm or float(np.median(rule.norms)), *NORMS), "log", low=1e-12, high=rule.norms.max()),),
        frozenset({"clip_missing", "clip_norm_local"}),
    )


def _by_value(program: OptimizerProgram, sample: Sample) -> OptimizerEdit:
    sizes = np.abs(sample.gradients / program.clipped[: len(sample.gradients), None])
    starts = tuple(float(x) for x in np.quantile(sizes, (0.5, 0.9, 0.99)) if x > 0)
    return OptimizerEdit(
        "clip_by_value",
        lambda r, v: replace(r, max_norm=None, largest=v[0]),
        lambda v: clip_words.by_value(v[0], program.max_norm),
        (Unknown((0.01, 0.1, 1.0, *starts), "log", low=1e-12, high=float(sizes.max())),),
        frozenset({"clip_norm", "clip_missing", "clip_norm_local", "clip_epsilon"}),
    )
