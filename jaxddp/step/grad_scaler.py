"""Dynamic loss scaling: `torch.amp.GradScaler`'s schedule as pure functions.

Small gradients underflow in float16, so the loss is multiplied by a scale before the backward pass, and the mean
gradients are divided by it. If the scale is too large, some gradients overflow, and the step is skipped:

    all gradients finite:       update,     tracker <- tracker + 1
    some gradient not finite:   no update,  tracker <- 0,  scale <- scale x backoff_factor
    tracker = growth_interval:              tracker <- 0,  scale <- scale x growth_factor

The mean gradients are checked, which all replicas share, so all replicas skip the same steps.

Source: pytorch.org/docs/stable/amp.html#gradient-scaling
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp

from jaxddp.config import TrainerConfig
from jaxddp.config.ranges import check_range
from jaxddp.nn.losses import Sums
from jaxddp.state import TrainState

MOVED = ("params", "opt_state", "averaged")  # changed only by the optimizer update


class ScalerState(NamedTuple):
    """State of a loss scaler: scalars, the same on all replicas.

    Attributes:
        scale: float32, factor of the loss.
        growth_tracker: int32, number of steps with finite gradients since the scale last changed.
        skipped: int32, number of steps skipped so far.
    """

    scale: jax.Array
    growth_tracker: jax.Array
    skipped: jax.Array

    def shown(self) -> dict[str, jax.Array]:
        """Return the state as a stage of a step; the key is not "scale", which is a parameter of BatchNorm."""
        return {"loss_scale": self.scale, "growth_tracker": self.growth_tracker, "skipped": self.skipped}


@dataclass(frozen=True)
class GradScaler:
    """A dynamic loss scaler with torch's names and defaults.

    Attributes:
        init_scale: initial scale.
        growth_factor: factor of the scale after `growth_interval` steps in a row with finite gradients.
        backoff_factor: factor of the scale after a skipped step.
        growth_interval: see growth_factor.

    Raises:
        InputError: an attribute is out of its range.

    >>> scaler = GradScaler(init_scale=8.0, growth_interval=2)
    >>> state = scaler.init()
    >>> for finite in (True, True, False):
    ...     state = scaler.update(state, jnp.asarray(finite))
    ...     print(state.scale, state.growth_tracker, state.skipped)
    8.0 1 0
    16.0 0 0
    8.0 0 1
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_range(field.name, getattr(self, field.name))

    def init(self) -> ScalerState:
        """Return the state before the first step."""
        return ScalerState(jnp.float32(self.init_scale), jnp.int32(0), jnp.int32(0))

    def scale(self, state: ScalerState, loss: jax.Array) -> jax.Array:
        """Multiply the loss by the scale."""
        return loss * state.scale.astype(loss.dtype)

    def unscale(self, state: ScalerState, gradients: Any) -> Any:
        """Divide the gradients by the scale."""
        inverse = 1 / state.scale  # in float32, as in torch
        return jax.tree.map(lambda g: g * inverse.astype(g.dtype), gradients)

    def step(self, before: TrainState, after: TrainState, finite: jax.Array) -> tuple[TrainState, Sums]:
        """Keep the optimizer update only if all gradients are finite, and update the scale.

        Buffers and the communication hook's state change either way, as in torch, where forward pass and reduction
        come before the check.

        Args:
            before, after: state without and with the update.
            finite: boolean scalar, the same on all replicas: whether the mean gradients, still scaled, are finite.

        Returns:
            The next state; the metrics "scale", with which the gradients were computed, and "skipped", 1 or 0.
        """
        moved = {
            name: jax.tree.map(partial(jnp.where, finite), getattr(after, name), getattr(before, name))
            for name in MOVED
        }
        state: ScalerState = before.scaler
        after = dataclasses.replace(after, **moved, scaler=self.update(state, finite))
        return after, {"scale": state.scale, "skipped": 1 - finite.astype(state.scale.dtype)}

    def update(self, state: ScalerState, finite: jax.Array) -> ScalerState:
        """Return the scaler's state after a step whose gradients are all finite, or not (`finite` False)."""
        grown = state.scale * self.growth_factor
        tracker = jnp.where(finite, state.growth_tracker + 1, 0)
        grows = tracker == self.growth_interval
        larger = jnp.where(grows & jnp.isfinite(grown), grown, state.scale)
        return ScalerState(
            scale=jnp.where(finite, larger, state.scale * self.backoff_factor),
            growth_tracker=jnp.where(grows, 0, tracker),
            skipped=state.skipped + jnp.where(finite, 0, 1),
        )


def all_finite(gradients: Any) -> jax.Array:
    """Check that no array of a tree holds an infinity or a NaN; return a boolean scalar.

    >>> bool(all_finite({"w": jnp.array([1.0, jnp.inf])}))
    False
    """
    return jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)]).all()


def from_config(config: TrainerConfig) -> GradScaler | None:
    """Return the scaler that `config` asks for; None without float16, since bfloat16 has float32's range."""
    if config.amp != "fp16":
        return None
    return GradScaler(config.init_scale, config.growth_factor, config.backoff_factor, config.growth_interval)
