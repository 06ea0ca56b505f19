"""Samplers of the examples of one rank, or of several in turn."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice, zip_longest
from typing import Any

from torch.utils.data import DistributedSampler, Sampler

from jaxddp.config import TrainerConfig
from jaxddp.data.order import Order, Shuffle, check_length, deal, epoch_order
from jaxddp.data.order import Sampler as OrderFunction
from jaxddp.data.sampler import samples_per_replica

CHUNK = 2**14  # places of an order that are looked up at once


class UnevenSampler(Sampler[int]):
    """Sampler of one rank's examples like DistributedSampler, without repetitions: dataset[rank::num_replicas].

    >>> [list(UnevenSampler(range(5), 2, rank, shuffle=False)) for rank in range(2)]
    [[0, 2, 4], [1, 3]]
    """

    def __init__(self, dataset: Any, num_replicas: int, rank: int, shuffle: bool = True, seed: int = 0):
        self._order: DistributedSampler[Any] = DistributedSampler(dataset, 1, 0, shuffle, seed)
        self._num_replicas, self._rank = num_replicas, rank
        self.set_epoch = self._order.set_epoch

    def __iter__(self) -> Iterator[int]:
        return islice(self._order, self._rank, None, self._num_replicas)

    def __len__(self) -> int:
        return len(range(self._rank, len(self._order), self._num_replicas))


class OrderSampler(Sampler[int]):
    """Sampler of one rank's examples in an order that torch does not have: of constant memory, or a user's.

    Args:
        order_of: epoch -> its order.
        num_replicas, rank, drop_last: as of DistributedSampler.
        join: neither repeat nor drop examples.

    >>> import numpy as np
    >>> list(OrderSampler(lambda epoch: np.array([4, 3, 2, 1, 0]), 2, 0))
    [4, 2, 0]
    """

    def __init__(
        self,
        order_of: Callable[[int], Order],
        num_replicas: int,
        rank: int,
        drop_last: bool = False,
        join: bool = False,
    ):
        self._order_of, self._num_replicas, self._rank = order_of, num_replicas, rank
        self._order = order_of(0)
        self._length = length = len(self._order)
        uneven = len(range(rank, length, num_replicas))
        self._share = uneven if join else samples_per_replica(length, num_replicas, drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of the next pass."""
        self._order = self._order_of(epoch)
        check_length(self._order, epoch, self._length)

    def __iter__(self) -> Iterator[int]:
        for first in range(0, self._share, CHUNK):
            last = min(first + CHUNK, self._share)
            yield from deal(self._order, self._num_replicas, [self._rank], first, last)[0].tolist()

    def __len__(self) -> int:
        return self._share


RankSampler = DistributedSampler[Any] | UnevenSampler | OrderSampler


class SharedSampler(Sampler[int]):
    """Sampler of several ranks' examples in turn: each batch is the union of their batches.

    >>> samplers = [DistributedSampler(range(5), 2, rank, shuffle=False) for rank in range(2)]
    >>> list(SharedSampler(samplers))
    [0, 1, 2, 3, 4, 0]
    """

    def __init__(self, samplers: Sequence[RankSampler]):
        self.samplers = samplers
        self.start = 0
        """Number of examples that the next pass skips, to resume within an epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of all samplers, which determines the order of the next pass."""
        for sampler in self.samplers:
            sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        examples = (example for turn in zip_longest(*self.samplers) for example in turn if example is not None)
        return islice(examples, self.start, None)

    def __len__(self) -> int:
        return sum(map(len, self.samplers))


def samplers(
    dataset: Any, config: TrainerConfig, num_replicas: int, sampler: OrderFunction | None = None, streamed: bool = False
) -> Sequence[RankSampler]:
    """Return the sampler of every rank; `streamed` examples keep their order."""
    ranks = range(num_replicas)
    if sampler is not None or config.shuffle == "index" or streamed:
        shuffle: Shuffle = False if streamed else "index"
        order_of = lru_cache(2)(lambda epoch: epoch_order(len(dataset), shuffle, config.seed, epoch, sampler))
        return [OrderSampler(order_of, num_replicas, rank, config.drop_last, config.join) for rank in ranks]
    if config.join:
        return [UnevenSampler(dataset, num_replicas, rank, bool(config.shuffle), config.seed) for rank in ranks]
    return [
        DistributedSampler(dataset, num_replicas, rank, bool(config.shuffle), config.seed, config.drop_last)
        for rank in ranks
    ]
