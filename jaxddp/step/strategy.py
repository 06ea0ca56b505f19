"""Interface of the strategies by which replicas share gradients, optimizer state and updates."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import jax
import optax

from jaxddp.state import Params, TrainState
from jaxddp.step.grad_scaler import all_finite


class Strategy(ABC):
    """Interface of a division of gradients, optimizer state and parameter updates among the replicas.

        Replicated      every replica makes the same update                      as torch's DDP
        Sharded         every replica updates one slice of all parameters        as ZeRO, stage 1
        PostLocalSGD    every replica makes its own update, averaged at times    as torch's post-local SGD

    A `jaxddp.step.replica_step.ReplicaStep` calls `mean` (or `part`, after a communication hook), `clip` and
    `update`, in this order. The default methods are right where each replica holds all gradients and all of the
    optimizer's state.

    Attributes:
        per_replica: fields of `TrainState` that differ between replicas.
        sliced: fields of `TrainState` that are split into a slice per replica.
    """

    per_replica: ClassVar[tuple[str, ...]] = ()
    sliced: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def mean(self, gradients: Params, step: jax.Array) -> Any:
        """Reduce the local gradients to the gradients that this replica's optimizer takes.

        Args:
            gradients: this replica's local gradients.
            step: int32 scalar, optimizer steps so far.
        """

    @abstractmethod
    def clip(self, gradients: Any, max_norm: float) -> tuple[Any, jax.Array]:
        """Clip to a global norm of `max_norm`; return the norm before clipping too, for the metrics."""

    def norm(self, gradients: Any) -> jax.Array:
        """Return the global norm of the gradients, the same on all replicas, for the metrics."""
        return optax.tree.norm(gradients)

    @abstractmethod
    def update(self, optimizer: optax.GradientTransformation, gradients: Any, state: TrainState) -> tuple[Params, Any]:
        """Return the next parameters and the optimizer's next state."""

    def part(self, gradients: Params) -> Any:
        """Return this replica's part of gradients that a communication hook has already reduced, as `mean` would."""
        return gradients

    def unsharded(self, gradients: Any) -> Params:
        """Return the unsliced gradients of a result of `mean` or `part`."""
        return gradients

    def all_finite(self, gradients: Any) -> jax.Array:
        """Check that the gradients of all replicas are finite: a boolean scalar, the same on all replicas."""
        return all_finite(gradients)

    def split(self, optimizer: optax.GradientTransformation, opt_state: Any, params: Params, world_size: int) -> Any:
        """Split the optimizer's state into slices, leaves (world_size, ...), if the strategy has slices."""
        return opt_state

    def join(self, opt_state: Any) -> Any:
        """Compute the inverse of `split`."""
        return opt_state
