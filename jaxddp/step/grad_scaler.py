"""Dynamic loss scaling: `torch.amp.GradScaler`'s schedule as pure functions.

Small gradients are lost in float16. So the loss is multiplied by a scale before the backward pass, and the mean
gradients are divided by it. With a scale that is too large some gradient overflows; then nothing moves:

    all gradients finite:  a step,   tracker <- tracker + 1
    one is not:            no step,  tracker <- 0,  scale <- scale x backoff_factor
    tracker = growth_interval:       tracker <- 0,  scale <- scale x growth_factor

What is looked at is the mean, which all replicas share, so all skip the same steps.

Source: pytorch.org/docs/stable/amp.html#gradient-scaling
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp

from jaxddp.config import TrainConfig
from jaxddp.config.ranges import check_range
from jaxddp.nn.losses import Sums
from jaxddp.state import TrainState

MOVED = ("params", "opt_state", "averaged")  # by an optimizer step, and by nothing else


class ScalerState(NamedTuple):
    """What the scaler remembers; scalars, the same on all replicas.

    Attributes:
        scale: float32.
        growth_tracker: int32, good steps since the scale changed last.
        skipped: int32, steps skipped so far.
    """

    scale: jax.Array
    growth_tracker: jax.Array
    skipped: jax.Array

    def shown(self) -> dict[str, jax.Array]:
        """As a stage of a step; in a model "scale" is a BatchNorm's."""
        return {"loss_scale": self.scale, "growth_tracker": self.growth_tracker, "skipped": self.skipped}


@dataclass(frozen=True)
class GradScaler:
    """torch's names and defaults.

    Attributes:
        init_scale: the first scale.
        growth_factor: what the scale is multiplied by after `growth_interval` good steps in a row.
        backoff_factor: what it is multiplied by after a skipped step.
        growth_interval: see growth_factor.

    Raises:
        InputError: an attribute out of its range.

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
        """The state before the first step."""
        return ScalerState(jnp.float32(self.init_scale), jnp.int32(0), jnp.int32(0))

    def scale(self, state: ScalerState, loss: jax.Array) -> jax.Array:
        """The loss that is differentiated."""
        return loss * state.scale.astype(loss.dtype)

    def unscale(self, state: ScalerState, gradients: Any) -> Any:
        """The gradients of the loss as it was."""
        inverse = 1 / state.scale  # in float32, as torch has it
        return jax.tree.map(lambda g: g * inverse.astype(g.dtype), gradients)

    def step(self, before: TrainState, after: TrainState, finite: jax.Array) -> tuple[TrainState, Sums]:
        """The state after a step that is made only if all gradients are finite, and the scaler's metrics.

        Buffers and the communication hook's state go on either way, as in torch: forward pass and
        reduction have been.

        Args:
            before, after: without and with the optimizer's step.
            finite: of the mean gradients, still scaled, as torch looks at them; the same on all replicas.

        Returns:
            The state; "scale", with which the step was tried, and "skipped", 1 or 0.
        """
        moved = {
            name: jax.tree.map(partial(jnp.where, finite), getattr(after, name), getattr(before, name))
            for name in MOVED
        }
        state: ScalerState = before.scaler
        after = dataclasses.replace(after, **moved, scaler=self.update(state, finite))
        return after, {"scale": state.scale, "skipped": 1 - finite.astype(state.scale.dtype)}

    def update(self, state: ScalerState, finite: jax.Array) -> ScalerState:
        """The scaler after a step whose gradients were finite, or were not."""
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
    """Whether no array of a tree holds an infinity or a NaN.

    >>> bool(all_finite({"w": jnp.array([1.0, jnp.inf])}))
    False
    """
    return jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)]).all()


def from_config(config: TrainConfig) -> GradScaler | None:
    """The scaler that `config` asks for: with float16; bfloat16 has float32's range and needs none."""
    if config.amp != "fp16":
        return None
    return GradScaler(config.init_scale, config.growth_factor, config.backoff_factor, config.growth_interval)
