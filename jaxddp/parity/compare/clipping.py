"""Clip by a global norm in NumPy, as torch.nn.utils.clip_grad_norm_ does."""

from typing import Any

import numpy as np

from jaxddp.parity.records import Tensors, stage_norm

TORCH_CLIP_EPSILON = 1e-6


def clip_factor(norm: Any, max_norm: float, epsilon: float = TORCH_CLIP_EPSILON) -> Any:
    """Return the factor on every gradient, min(1, max_norm / (norm + epsilon)); 1 where norm + epsilon is 0.

    Args:
        norm: global norm of the gradients; an array holds one norm per replica.
        max_norm: largest norm after clipping.
        epsilon: added to the norm.
    """
    total = np.asarray(norm + epsilon, float)
    return np.minimum(1.0, np.divide(max_norm, total, out=np.ones_like(total), where=total != 0))


def clip(
    gradients: Tensors,
    max_norm: float,
    epsilon: float = TORCH_CLIP_EPSILON,
    norm_scale: float = 1.0,
    norm: float | None = None,
) -> Tensors:
    """Return g min(1, max_norm / (norm_scale |g| + epsilon)) for every gradient g, where |g| is the global norm.

    Args:
        gradients: one replica's gradients by name.
        max_norm: largest norm after clipping.
        epsilon: added to the norm.
        norm_scale: factor on the norm; 1 is torch's clipping, others are planted faults.
        norm: |g|; None: it is computed from the gradients, which then are full tensors.

    >>> clip({"w": np.array([3.0, 4.0])}, 2.5)["w"].round(5)
    array([1.5, 2. ])
    """
    norm = stage_norm(gradients) if norm is None else norm
    factor = float(clip_factor(norm_scale * norm, max_norm, epsilon))
    return {name: value * factor for name, value in gradients.items()}
