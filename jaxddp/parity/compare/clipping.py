"""Clip gradients in NumPy, as torch.nn.utils.clip_grad_norm_ and clip_grad_value_ do."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxddp.parity.records import Tensors, stage_norm

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


NOT_CLIPPED = Clipping()
