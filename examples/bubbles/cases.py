"""Which replica has how much to do where, and what the replicas tell each other meanwhile.

The model is two blocks, each h = tanh(h W) a number of times, which is each replica's own as a text's length would
be. Before them a replica may have work from which nothing is learned (a frozen encoder), which is forward only.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

REPLICAS, BLOCKS = 2, 2
VALID = (1.0, 0.5)  # the share of a replica's examples that count
EPSILON = 1e-5  # of the normalisation


@dataclass(frozen=True)
class Case:
    """A step to be measured.

    Attributes:
        passes: of each replica, how often it goes through each block.
        frozen: of each replica, how many passes nothing is learned from.
        pause: of each replica, seconds for which its forward pass sleeps.
        sync_batch_norm: whether activations are normalised over all replicas' examples, or the replica's own.
        sync_loss: whether the number of all examples is all-reduced before the backward pass, or with the gradients.
    """

    passes: tuple[tuple[int, ...], ...] = ((1, 1), (1, 1))
    frozen: tuple[int, ...] = (0, 0)
    pause: tuple[float, ...] = (0.0, 0.0)
    sync_batch_norm: bool = False
    sync_loss: bool = False


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        cases: by name.
        steps: of each case, after one that is not counted.
        examples, features: of each replica's activations.
    """

    cases: dict[str, Case]
    steps: int = 9
    examples: int = 512
    features: int = 256

    @property
    def most_passes(self) -> int:
        """Through one block."""
        return max(count for case in self.cases.values() for of_replica in case.passes for count in of_replica)

    def inputs(self) -> dict[str, NDArray[np.float32]]:
        """Of each replica, "x" and "y" (W, B, D), and "weights" (W, B): 0 for examples that do not count."""
        rng = np.random.default_rng(0)
        shape = REPLICAS, self.examples, self.features
        x, y = rng.normal(size=(2, *shape)).astype(np.float32)
        counting = np.arange(self.examples) < np.array(VALID)[:, None] * self.examples
        return {"x": x, "y": y, "weights": counting.astype(np.float32)}

    def kernels(self) -> NDArray[np.float32]:
        """The blocks' weights, the same on all replicas, (blocks, D, D)."""
        shape = BLOCKS, self.features, self.features
        return (np.random.default_rng(1).normal(size=shape) / np.sqrt(self.features)).astype(np.float32)


LIGHT, EVEN, HEAVY = 1, 4, 7
TURNS = ((HEAVY, LIGHT), (LIGHT, HEAVY))
# A pass from which is learned takes, with its backward pass, as long as 3.5 others (measured: 3 to 5): so both replicas
# have as much to do, one of them forward, the other backward.
MORE = (LIGHT, LIGHT), (HEAVY, HEAVY)
APART = Case(passes=MORE, frozen=(7 * (HEAVY - LIGHT), 0))
BALANCED, UNBALANCED, IN_TURNS, BATCH_NORM, LOSS_ALONE, LOSS_TOGETHER = NAMES = (
    "equal work",
    "one has more",
    "each has more in its turn",
    "the same, batch norm over all",
    "one forward, the other backward; loss over all first",
    "the same, its count beside the gradients",
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
