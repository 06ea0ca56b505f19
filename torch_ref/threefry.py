"""jax's counter-based random numbers without jax: the same key gives the same bits.

`torch_ref.dropout` draws by them what `jaxddp.nn.layers.Dropout` draws. A key is two 32-bit words, uint32 (2,); what
is drawn depends on the key alone, so nothing has to be kept between two calls.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def key(seed: int) -> Words:
    """`jax.random.key(seed)`, of the lower 32 bits of the seed.

    >>> key(7)
    array([0, 7], dtype=uint32)
    """
    return np.array([0, seed & 0xFFFFFFFF], np.uint32)


def fold_in(key: Words, number: int) -> Words:
    """`jax.random.fold_in(key, number)`: a key for each number.

    >>> fold_in(key(0), 1)
    array([ 928981903, 3453687069], dtype=uint32)
    """
    return np.concatenate(threefry2x32(key, np.zeros(1, np.uint32), np.array([number & 0xFFFFFFFF], np.uint32)))


def bits(key: Words, shape: tuple[int, ...]) -> Words:
    """`jax.random.bits(key, shape, "uint32")`: one word for each element, of its number in row-major order.

    >>> bits(key(0), (2,))
    array([4070199207, 4202968722], dtype=uint32)
    """
    numbers = np.arange(np.prod(shape, dtype=np.int64), dtype=np.uint64)
    high, low = threefry2x32(key, (numbers >> np.uint64(32)).astype(np.uint32), numbers.astype(np.uint32))
    return (high ^ low).reshape(shape)


def threefry2x32(key: Words, x0: Words, x1: Words) -> tuple[Words, Words]:
    """Threefry-2x32 with 20 rounds: the block (x0, x1) of counters, encrypted by the key, element by element.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011.
    """
    keys = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(PARITY))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for turn in range(5):
        for rotation in ROTATIONS[turn % 2]:
            x0 = x0 + x1
            x1 = x0 ^ _rotated(x1, rotation)
        x0 = x0 + keys[(turn + 1) % 3]
        x1 = x1 + keys[(turn + 2) % 3] + np.uint32(turn + 1)
    return x0, x1


def _rotated(x: Any, by: int) -> Any:
    return (x << np.uint32(by)) | (x >> np.uint32(32 - by))
