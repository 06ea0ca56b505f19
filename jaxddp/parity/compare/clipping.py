"""Clip gradients in NumPy, like torch.nn.utils.clip_grad_norm_ and clip_grad_value_, and tell how a record clips."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxddp.parity.port import Facts
from jaxddp.parity.records import Record, Tensors, full_norm, of_loss, stage_norm

TORCH_EPSILON = 1e-6


@dataclass(frozen=True)
class Clipping:
    """Clipping by the global norm |g|, g <- g min(1, max_norm / (norm_scale |g| + epsilon)), then by value.

    Attributes:
        max_norm: largest norm after clipping; None: no clipping by norm.
        epsilon: added to the norm.
        norm_scale: factor on the norm; 1 is torch's clipping, others are mistakes.
        largest: elements are clipped to -largest .. largest; None: no clipping by value.
    """

    max_norm: float | None = None
    epsilon: float = TORCH_EPSILON
    norm_scale: float = 1.0
    largest: float | None = None

    def factor(self, norm: Any) -> Any:
        """Return the factor of every gradient; 1 where the denominator is 0.

        Args:
            norm: |g|; an array holds one norm per replica.
        """
        if self.max_norm is None:
            return np.ones_like(norm, float)
        total = np.asarray(self.norm_scale * norm + self.epsilon, float)
        return np.minimum(1.0, np.divide(self.max_norm, total, out=np.ones_like(total), where=total != 0))

    def by_value(self, value: Any) -> Any:
        """Clip the elements of an array or tensor by value."""
        return value if self.largest is None else value.clip(-self.largest, self.largest)

    def clip(self, gradients: Tensors, norm: float | None = None) -> Tensors:
        """Clip one replica's gradients.

        Args:
            gradients: by name.
            norm: |g|; None: it is computed from the gradients, which then are full tensors.

        >>> Clipping(2.5).clip({"w": np.array([3.0, 4.0])})["w"].round(5)
        array([1.5, 2. ])
        """
        factor = float(self.factor(stage_norm(gradients) if norm is None else norm))
        return {name: self.by_value(value * factor) for name, value in gradients.items()}

    def slack(self, norm: float) -> float:
        """Return by how much updates may differ as one side adds `TORCH_EPSILON` to the norm and the other does not.

        >>> Clipping(2.5).slack(2.0), Clipping(2.5).slack(10.0)
        (0.0, 2e-07)
        """
        return 2 * TORCH_EPSILON / norm if self.max_norm is not None and norm > self.max_norm else 0.0


NOT_CLIPPED = Clipping()


def mean_gradients(torch: Record, jax: Record, shown: bool = False) -> tuple[Tensors, float]:
    """Return the mean over the replicas of the gradients of jax's loss, and the norm of the mean.

    Where records hold excerpts, the norm is as much larger than that of the excerpts as torch's is.

    Args:
        torch, jax: records of one step.
        shown: take the local gradients that a `jax_step` shows, if it does.
    """
    local = jax.get("local_gradients") if shown else None
    mean = {name: x.mean(0) for name, x in (local or of_loss(jax, "local_gradients")).items()}
    return mean, beyond_excerpts(torch) * stage_norm(mean)


def beyond_excerpts(torch: Record) -> float:
    """Return the norm of the reference's gradients over that of what the record holds of them, 1 if that is all."""
    of_excerpts = stage_norm(torch["gradients"])
    return full_norm(torch, "gradients") / of_excerpts if of_excerpts else 1.0


def beyond_local_excerpts(jax: Record) -> np.ndarray:
    """Return the norm of each replica's gradients of jax's loss over that of what the record holds of them, (W,).

    >>> norms = {"local_gradients:w": np.array([6.0])}
    >>> beyond_local_excerpts({"local_gradients": {"w": np.array([[3.0]])}, "local_norms": norms})
    array([2.])
    """
    stage = "pure_local_gradients" if "pure_local_gradients" in jax else "local_gradients"

    def of_rank(rank: int) -> float:
        known = {stage: jax[stage], "norms": jax.get("local_norms", {})}
        own = {part: {name: x[rank] for name, x in of.items()} for part, of in known.items()}
        of_excerpts = stage_norm(own[stage])
        return full_norm(own, stage) / of_excerpts if of_excerpts else 1.0

    return np.array([of_rank(rank) for rank in range(len(next(iter(jax[stage].values()))))])


def reference_clipping(facts: Facts) -> Clipping:
    """Return how the reference clips gradients."""
    return Clipping(facts.clip_grad_norm, largest=facts.clip_grad_value)


def shows_clipping(jax: Record, facts: Facts) -> bool:
    """Return whether jax's record shows the clipped gradients and not only their effect on the updates."""
    return "clipped_gradients" in jax and not facts.clips_inside
