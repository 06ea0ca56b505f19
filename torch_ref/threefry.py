"""jax's counter-based random numbers without jax: equal keys give equal bits.

`torch_ref.dropout` uses them to draw the masks of `jaxddp.nn.layers.Dropout`. A key is two 32-bit words, uint32 (2,).
The numbers depend only on the key, so there is no state.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def key(seed: int) -> Words:
    """Return `jax.random.key(seed)`, for the lower 32 bits of the seed.

    >>> key(7)
    array([0, 7], dtype=uint32)
    """
    return np.array([0, seed & 0xFFFFFFFF], np.uint32)


def fold_in(key: Words, number: int) -> Words:
    """Return `jax.random.fold_in(key, number)`, a key for each number.

    >>> fold_in(key(0), 1)
    array([ 928981903, 3453687069], dtype=uint32)
    """
    return np.concatenate(threefry2x32(key, np.zeros(1, np.uint32), np.array([number & 0xFFFFFFFF], np.uint32)))


def bits(key: Words, shape: tuple[int, ...]) -> Words:
    """Return `jax.random.bits(key, shape, "uint32")`: a word per element, from its number in row-major order.

    >>> bits(key(0), (2,))
    array([4070199207, 4202968722], dtype=uint32)
    """
    numbers = np.arange(np.prod(shape, dtype=np.int64), dtype=np.uint64)
    high, low = threefry2x32(key, (numbers >> np.uint64(32)).astype(np.uint32), numbers.astype(np.uint32))
    return (high ^ low).reshape(shape)


def threefry2x32(key: Words, x0: Words, x1: Words) -> tuple[Words, Words]:
    """Encrypt a block (x0, x1) of counters by the key, element by element: Threefry-2x32 with 20 rounds.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011.
    """
    keys = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(PARITY))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):  # of four rounds each
        for rotation in ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ _rotate(x1, rotation)
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def _rotate(x: Any, by: int) -> Any:
    return (x << np.uint32(by)) | (x >> np.uint32(32 - by))
