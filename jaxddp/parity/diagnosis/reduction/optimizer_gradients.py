"""Causes of a difference in the gradients that a `torch_step`'s optimizers get, from only these gradients."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxddp.parity.compare.patterns import scaled
from jaxddp.parity.compare.residuals import norm
from jaxddp.parity.deviation import Deviation
from jaxddp.parity.diagnosis.reduction.faults import NO_MEAN, wrong_means
from jaxddp.parity.diagnosis.reduction.reduction_causes import FLOOR
from jaxddp.parity.diagnosis.search.decide import Hypothesis, Ruling, decide
from jaxddp.parity.records import Tensors, relative, stage_norm

Received = tuple[Tensors, Tensors]  # JAX's, (W, ...), and torch's


def explain_received(steps: Sequence[Received], sizes: Mapping[int, str], floor: float = FLOOR) -> Ruling:
    """Name the mistake in the reduction that explains all tensors that differ.

    Args:
        steps: per step, the gradients that JAX's optimizers got, (W, ...), and those that torch's got, (...).
        sizes: sizes of the batch, in words.
        floor: the largest residual that counts as rounding.

    >>> import numpy as np
    >>> torch = {"weight": np.array([1.0, 3.0])}
    >>> jax = {"weight": 32 * np.tile(torch["weight"], (2, 1))}
    >>> explain_received([(jax, torch)], {32: "the batch"}).named[0].says
    'a sum over the batch, the reference takes the mean: gradients times 32'
    """
    if _tried(Deviation("", ""), steps, lambda jax, torch: jax - torch).residual <= floor:  # another difference
        return Ruling((), None)
    world_size = len(next(iter(steps[0][0].values())))
    of_replicas = _hypotheses(steps, world_size) if world_size > 1 else ()
    return decide([*of_replicas, *_sums(steps, {size: sizes[size] for size in sizes if size != world_size})], floor)


def _sums(steps: Sequence[Received], sizes: Mapping[int, str]) -> Iterator[Hypothesis]:
    for factor in (factor for size in sizes for factor in (float(size), 1 / size)):
        times = scaled("gradients", factor, sizes)
        yield _tried(times, steps, lambda jax, torch, factor=factor: jax - factor * torch)


def _hypotheses(steps: Sequence[Received], world_size: int) -> Iterator[Hypothesis]:
    for mean, factor in wrong_means(world_size):
        yield _tried(mean, steps, lambda jax, torch, factor=factor: jax - factor * torch)
    yield _tried(NO_MEAN, steps, lambda jax, torch: jax.mean(0) - torch)


def _tried(deviation: Deviation, steps: Sequence[Received], left: Callable[..., object]) -> Hypothesis:
    """Return the hypothesis that each tensor has the fault or not, whichever leaves less."""
    worst = 0.0
    for jax, torch in steps:
        scales = stage_norm(torch), stage_norm(jax)
        for name, value in jax.items():
            expected = torch.get(name, 0.0 * value[0])
            own = min(norm(value - expected), norm(left(value, expected)))  # type: ignore[arg-type]
            worst = max(worst, relative(own, *scales))
    return Hypothesis((deviation,), worst)
