"""Orders of an epoch's examples: torch's shuffle, one of constant memory, or a user's, dealt to the replicas."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from jaxddp.data.torch_rng import Generator, Permutation
from jaxddp.errors import InputError, described

Indices = NDArray[np.int64]
Shuffle = bool | str
"""True: torch's; "index": one of constant memory; False: none."""
Sampler = Callable[[int, int, int], Indices]
"""(epoch, seed, size of the dataset) -> the indices of the epoch's examples over all replicas, int64 (n,)."""

PADDING = -1  # index of padding, where a replica has run out of examples
MOST_NAMED = 16  # examples in a message
ROUNDS = 8  # of the index shuffle; 4 make a pseudorandom permutation of a random function (Luby and Rackoff)


class Unshuffled:
    """The order 0, 1, 2, ..., without memory.

    >>> Unshuffled(9)[np.array([[2, 3]])]
    array([[2, 3]])
    """

    def __init__(self, size: int):
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, places: NDArray[np.int64]) -> Indices:
        return places


class IndexShuffle(Unshuffled):
    """A permutation of 0 to size - 1 in constant memory, for data whose permutation does not fit into memory.

    A Feistel network permutes the numbers below the next power of 2; a number that is not below `size` is permuted
    again until it is, at most twice on average (Black and Rogaway's cycle walking).

    Considered and left: Grain's `index_shuffle`, which takes one index a call: 5 us each, where this takes 0.1.

    Args:
        size: number of examples, up to 2**62.
        seed: seed of the order.

    >>> IndexShuffle(7, seed=0)[np.arange(7)].tolist()
    [4, 1, 5, 0, 2, 6, 3]
    """

    def __init__(self, size: int, seed: int):
        super().__init__(size)
        self._bits = max(2, (size - 1).bit_length())
        self._keys = np.random.SeedSequence(seed % 2**64).generate_state(ROUNDS, np.uint64)

    def __getitem__(self, places: NDArray[np.int64]) -> Indices:
        numbers = self._permuted(places.astype(np.uint64))
        while (outside := numbers >= self._size).any():
            numbers[outside] = self._permuted(numbers[outside])
        return numbers.astype(np.int64)

    def _permuted(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Permute numbers below 2**bits: each round swaps the halves and adds a hash of one to the other."""
        for number, key in enumerate(self._keys):
            upper = self._bits // 2 if number % 2 else self._bits - self._bits // 2
            lower = self._bits - upper
            low = numbers & np.uint64(2**lower - 1)
            high = numbers >> np.uint64(lower) ^ _hash(low + key) & np.uint64(2**upper - 1)
            numbers = low << np.uint64(upper) | high
        return numbers


Order = Unshuffled | Permutation | Indices  # indices of one epoch's examples over all replicas


def _hash(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of each number: the finalizer of MurmurHash3."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        numbers = (numbers ^ numbers >> np.uint64(33)) * np.uint64(factor)
    return numbers ^ numbers >> np.uint64(33)


def epoch_order(size: int, shuffle: Shuffle, seed: int, epoch: int, sampler: Sampler | None = None) -> Order:
    """Return the order of an epoch.

    Args:
        size: number of examples, at least 0.
        shuffle: True: torch's, drawn from seed + epoch; "index": `IndexShuffle`; False: 0, 1, 2, ...
        seed: seed of the order; with torch's shuffle, seed + epoch must be below 2**64.
        epoch: number of the epoch.
        sampler: replaces `shuffle`.

    Raises:
        InputError: an argument out of range, or the sampler's indices are not those of examples.

    >>> backwards = epoch_order(3, True, 0, 0, sampler=lambda epoch, seed, size: np.arange(size)[::-1])
    >>> backwards[np.array([0])]
    array([2])
    """
    if sampler is not None:
        return _sampled(sampler, epoch, seed, size)
    if shuffle == "index":
        return IndexShuffle(size, seed + epoch)
    return Permutation(Generator(seed + epoch), size) if shuffle else Unshuffled(size)


def _sampled(sampler: Sampler, epoch: int, seed: int, size: int) -> Indices:
    where = f"sampler({epoch}, {seed}, {size})"
    try:
        indices = np.asarray(sampler(epoch, seed, size))
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{where}: {described(error)}") from error
    if indices.ndim != 1 or indices.dtype.kind not in "iu" or not len(indices):
        raise InputError(f"{where}: must be integers (n,), and is {indices.dtype} {indices.shape}")
    if (wrong := np.flatnonzero((indices < 0) | (indices >= size))).size:
        place = int(wrong[0])
        raise InputError(f"{where}: entry {place} is {indices[place]}; must be from 0 to {size - 1}")
    return indices.astype(np.int64, copy=False)


def check_length(order: Order, epoch: int, length: int) -> None:
    """Raise `InputError` unless the order of an epoch is as long as that of epoch 0."""
    if len(order) != length:
        counts = f"epoch {epoch} has {len(order)} indices, and epoch 0 {length}"
        raise InputError(f"sampler: {counts}; each epoch must have as many")


def batch_of(
    order: Order, num_replicas: int, first: int, last: int, join: bool, place: int | None = None, number: int = 1
) -> str:
    """Describe the examples that `deal` gives to all replicas, for a message.

    Args:
        place, number: place among them of the first whose loss is not finite, and the number of such examples.

    >>> batch_of(Unshuffled(50), 2, 18, 26, False)
    'its batch has the examples 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 0, 1'
    >>> batch_of(Unshuffled(50), 2, 0, 2, False, place=3)
    'the loss of example 3 is not finite; its batch has the examples 0, 1, 2, 3'
    """
    indices = deal(order, num_replicas, range(num_replicas), first, last, join).T.ravel()
    examples = [str(index) for index in indices if index != PADDING]
    more = f" and {len(examples) - MOST_NAMED} more" if len(examples) > MOST_NAMED else ""
    others = f" (and of {number - 1} more)" if number > 1 else ""
    culprit = "" if place is None else f"the loss of example {indices[place]}{others} is not finite; "
    return f"{culprit}its batch has the examples {', '.join(examples[:MOST_NAMED])}{more}"


def deal(order: Order, num_replicas: int, ranks: Sequence[int], first: int, last: int, join: bool = False) -> Indices:
    """Return the examples `first` to `last` - 1 of some replicas, as torch's DistributedSampler deals them.

    Replica r takes the places r, r + num_replicas, r + 2 num_replicas, ... of the order, which repeats from its
    start.

    Args:
        order: order of an epoch.
        num_replicas: number of replicas.
        ranks: ranks of the R replicas.
        first, last: range of the examples of each.
        join: do not repeat the order; places beyond it hold `PADDING`.

    Returns:
        int64 (R, last - first).

    >>> deal(Unshuffled(5), 2, [0, 1], 1, 3)
    array([[2, 4],
           [3, 0]])
    """
    places = np.arange(first, last) * num_replicas + np.array(ranks, np.int64)[:, None]
    if not len(order):
        return places[:, :0]
    indices = order[places % len(order)].astype(np.int64, copy=False)
    return np.where(places < len(order), indices, PADDING) if join else indices
