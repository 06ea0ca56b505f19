"""Distribution of examples over replicas: torch's DistributedSampler without torch."""

import math
from collections.abc import Iterator, Sequence, Sized

import numpy as np
from numpy.typing import NDArray

from jaxddp.data.order import PADDING, Sampler, Shuffle, deal, epoch_order
from jaxddp.errors import InputError

LINE_WIDTH = 100  # of a shard table
FEW = 12  # maximum of repeated or dropped examples that a shard table lists


def epoch_indices(
    dataset_size: int,
    num_replicas: int,
    *,
    shuffle: Shuffle = True,
    seed: int = 0,
    epoch: int = 0,
    drop_last: bool = False,
    join: bool = False,
    sampler: Sampler | None = None,
) -> NDArray[np.int64]:
    """Return the examples of each replica in one epoch, as torch's DistributedSampler distributes them.

    The order of the dataset (shuffled by seed + epoch) is extended to a multiple of num_replicas by
    repeating it from its start or, with drop_last, truncated to one. Replica r then takes the
    positions r, r + num_replicas, r + 2 num_replicas, ...

    Args:
        dataset_size: number of examples, at least 0.
        num_replicas: number of replicas, at least 1.
        shuffle: draw a new order each epoch; otherwise 0, 1, 2, ... "index": one of constant memory.
        seed: seed of the order, equal on all replicas; seed + epoch must be below 2**64.
        epoch: number of the epoch, the argument of torch's `set_epoch`.
        drop_last: drop examples instead of repeating some.
        join: do neither; positions beyond the last example hold `PADDING`.
        sampler: replaces `shuffle`, see `jaxddp.data.order.Sampler`.

    Returns:
        int64 (num_replicas, samples_per_replica); row r holds the indices that the sampler of rank r yields.

    Raises:
        InputError: an argument out of range.

    Source: torch.utils.data.DistributedSampler.

    >>> epoch_indices(9, 2, shuffle=False)
    array([[0, 2, 4, 6, 8],
           [1, 3, 5, 7, 0]])
    >>> epoch_indices(9, 2, shuffle=False, join=True)[1]
    array([ 1,  3,  5,  7, -1])
    """
    samples_per_replica(dataset_size, num_replicas, drop_last)  # checks them
    order = epoch_order(dataset_size, shuffle, seed, epoch, sampler)
    last = samples_per_replica(len(order), num_replicas, drop_last)
    return deal(order, num_replicas, range(num_replicas), 0, last, join)


class DistributedSampler:
    """Sampler of one replica's examples, equal to torch.utils.data.DistributedSampler.

    Args:
        dataset: any object with a length, or the length.
        num_replicas, rank: as in torch, but required, since there is no process group to take them from.
        shuffle, seed, drop_last: see `epoch_indices`.

    Attributes:
        num_samples: examples per replica and epoch.
        total_size: examples per epoch over all replicas.

    Raises:
        InputError: an argument out of range.

    >>> sampler = DistributedSampler(range(9), num_replicas=2, rank=1, shuffle=False)
    >>> list(sampler)
    [1, 3, 5, 7, 0]
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int,
        rank: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.dataset = dataset
        self.dataset_size = dataset if isinstance(dataset, int) else len(dataset)
        self.num_samples = samples_per_replica(self.dataset_size, num_replicas, drop_last)
        self.total_size = self.num_samples * num_replicas
        if not 0 <= rank < num_replicas:
            raise InputError(f"rank {rank}: must be from 0 to {num_replicas - 1}")
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of the next pass; without it all passes have the same order."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = epoch_order(self.dataset_size, self.shuffle, self.seed, self.epoch)
        return iter(deal(order, self.num_replicas, [self.rank], 0, self.num_samples)[0].tolist())

    def __len__(self) -> int:
        return self.num_samples


def samples_per_replica(dataset_size: int, num_replicas: int, drop_last: bool = False) -> int:
    """Return the number of examples that each replica takes per epoch.

    Raises:
        InputError: an argument out of range.

    >>> samples_per_replica(9, 2), samples_per_replica(9, 2, drop_last=True)
    (5, 4)
    """
    if dataset_size < 0:
        raise InputError(f"dataset_size {dataset_size}: must be at least 0")
    if num_replicas < 1:
        raise InputError(f"num_replicas {num_replicas}: must be at least 1")
    return dataset_size // num_replicas if drop_last else -(-dataset_size // num_replicas)


def shard_table(indices: NDArray[np.int64], per_replica_batch_size: int, dataset_size: int) -> str:
    """Format a text table of the examples that each replica sees in each step of an epoch.

    Examples are numbered from x1; a star marks the repetition of an example. Tables wider than
    100 characters continue below.

    Args:
        indices: int64 (num_replicas, samples_per_replica), as `epoch_indices` returns them; the cells of
            `PADDING` are blank.
        per_replica_batch_size: examples per replica and step; the last step takes the rest.
        dataset_size: number of examples in the dataset.

    Raises:
        InputError: a batch size below 1.

    >>> print(shard_table(epoch_indices(9, 2, shuffle=False), 3, 9))
              | step 1   | step 2
    ----------+----------+-------
    replica 0 | x1 x3 x5 | x7 x9
    replica 1 | x2 x4 x6 | x8 x1*
    <BLANKLINE>
    9 examples on 2 replicas: 1 repeated (*), so that all get equally many: x1
    """
    if per_replica_batch_size < 1:
        raise InputError(f"per_replica_batch_size {per_replica_batch_size}: must be at least 1")
    num_replicas = len(indices)
    order = indices.T.ravel()  # step by step, rank by rank
    repeated = np.ones(order.size, dtype=bool)
    repeated[np.unique(order, return_index=True)[1]] = False
    repeated &= order != PADDING
    names = [
        "" if example == PADDING else f"x{example + 1}" + "*" * star
        for example, star in zip(order.tolist(), repeated.tolist(), strict=True)
    ]

    labels = _padded(["", *(f"replica {rank}" for rank in range(num_replicas))])
    room = LINE_WIDTH - len(labels[0])
    dealt = [_padded(names[start : start + num_replicas]) for start in range(0, len(names), num_replicas)]
    blocks = [_block([labels, *columns]) for columns in _pack(_step_columns(dealt, per_replica_batch_size, room), room)]
    dropped = np.setdiff1d(np.arange(dataset_size), order)
    return "\n\n".join([*blocks, _balance(dataset_size, num_replicas, order[repeated].tolist(), dropped.tolist())])


def _step_columns(dealt: list[list[str]], batch_size: int, room: int) -> Iterator[list[str]]:
    """Yield table columns [heading, cell of replica 0, ...], one per step, or several if a step is too wide."""
    widest = max((len(names[0]) for names in dealt), default=0)
    most = max(1, (room - 2) // (widest + 1))
    per_column = math.ceil(batch_size / math.ceil(batch_size / most))  # parts of about equal width
    for step, first in enumerate(range(0, len(dealt), batch_size), start=1):
        batch = dealt[first : first + batch_size]
        for start in range(0, len(batch), per_column):
            cells = map(" ".join, zip(*batch[start : start + per_column], strict=True))
            yield _padded([f"step {step}" + " continued" * (start > 0), *cells])


def _pack(columns: Iterator[list[str]], room: int) -> Iterator[list[list[str]]]:
    """Yield groups of neighbouring columns that fit side by side."""
    group: list[list[str]] = []
    for column in columns:
        if group and sum(len(" | " + member[0]) for member in [*group, column]) > room:
            yield group
            group = []
        group.append(column)
    if group:
        yield group


def _block(columns: list[list[str]]) -> str:
    heading, *rows = zip(*columns, strict=True)
    rule = "-+-".join("-" * len(cell) for cell in heading)
    lines = [" | ".join(heading), rule, *map(" | ".join, rows)]
    return "\n".join(line.rstrip() for line in lines)


def _padded(cells: Sequence[str]) -> list[str]:
    width = max(map(len, cells))
    return [cell.ljust(width) for cell in cells]


def _balance(dataset_size: int, num_replicas: int, repeated: list[int], dropped: list[int]) -> str:
    """Summarize in one line which examples are repeated or dropped."""
    parts = [
        f"{len(examples)} {fate}, so that all get equally many: {_few(examples)}"
        for examples, fate in ((repeated, "repeated (*)"), (dropped, "dropped"))
        if examples
    ]
    examples, replicas = _count(dataset_size, "example"), _count(num_replicas, "replica")
    return f"{examples} on {replicas}: {'; '.join(parts) or 'each used once'}"


def _few(examples: list[int]) -> str:
    names = [f"x{example + 1}" for example in examples[:FEW]]
    return " ".join(names) + " ..." * (len(examples) > FEW)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)
