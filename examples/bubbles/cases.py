"""Cases to measure: how much work each replica has in which phase, and what the replicas exchange meanwhile.

The model has two blocks. Each applies h = tanh(h W) a number of times that differs between replicas, as the length of
a text would. A replica may also have work before the blocks from which nothing is learned (a frozen encoder): forward
passes only.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

REPLICAS, BLOCKS = 2, 2
VALID = (1.0, 0.5)  # the share of a replica's examples that count
EPSILON = 1e-5  # of the normalisation


@dataclass(frozen=True)
class Case:
    """A step to measure.

    Attributes:
        passes: passes through each block, for each replica.
        frozen: passes from which nothing is learned, for each replica.
        pause: seconds that the forward pass sleeps, for each replica.
        sync_batch_norm: normalise activations over the examples of all replicas instead of the replica's own.
        sync_loss: all-reduce the number of examples before the backward pass instead of with the gradients.
    """

    passes: tuple[tuple[int, ...], ...] = ((1, 1), (1, 1))
    frozen: tuple[int, ...] = (0, 0)
    pause: tuple[float, ...] = (0.0, 0.0)
    sync_batch_norm: bool = False
    sync_loss: bool = False


@dataclass(frozen=True)
class Plan:
    """A measurement.

    Attributes:
        cases: the cases by name.
        steps: measured steps per case, after one warm-up step.
        examples, features: shape of each replica's activations.
    """

    cases: dict[str, Case]
    steps: int = 9
    examples: int = 512
    features: int = 256

    @property
    def most_passes(self) -> int:
        """Largest number of passes through one block."""
        return max(count for case in self.cases.values() for of_replica in case.passes for count in of_replica)

    def inputs(self) -> dict[str, NDArray[np.float32]]:
        """Return every replica's "x" and "y" (W, B, D), and "weights" (W, B): 0 for examples that do not count."""
        rng = np.random.default_rng(0)
        shape = REPLICAS, self.examples, self.features
        x, y = rng.normal(size=(2, *shape)).astype(np.float32)
        counting = np.arange(self.examples) < np.array(VALID)[:, None] * self.examples
        return {"x": x, "y": y, "weights": counting.astype(np.float32)}

    def kernels(self) -> NDArray[np.float32]:
        """Return the blocks' weights, (blocks, D, D), the same on all replicas."""
        shape = BLOCKS, self.features, self.features
        return (np.random.default_rng(1).normal(size=shape) / np.sqrt(self.features)).astype(np.float32)


LIGHT, EVEN, HEAVY = 1, 4, 7
TURNS = ((HEAVY, LIGHT), (LIGHT, HEAVY))
# A trained pass takes, with its backward pass, as long as 3.5 frozen ones (measured: 3 to 5). Both replicas therefore
# have the same amount of work, one of them mostly forward, the other mostly backward.
MORE = (LIGHT, LIGHT), (HEAVY, HEAVY)
APART = Case(passes=MORE, frozen=(7 * (HEAVY - LIGHT), 0))
BALANCED, UNBALANCED, IN_TURNS, BATCH_NORM, LOSS_ALONE, LOSS_TOGETHER = NAMES = (
    "equal work",
    "replica 1 has more work",
    "each replica has more work in one block",
    "the same, with synchronised BatchNorm",
    "uneven forward and backward work; count sent first",
    "the same, count sent with the gradients",
)
PLAN = Plan(
    {
        BALANCED: Case(passes=((EVEN, EVEN), (EVEN, EVEN))),
        UNBALANCED: Case(passes=MORE),
        IN_TURNS: Case(passes=TURNS),
        BATCH_NORM: Case(passes=TURNS, sync_batch_norm=True),
        LOSS_ALONE: replace(APART, sync_loss=True),
        LOSS_TOGETHER: APART,
    }
)
