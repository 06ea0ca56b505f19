"""torch's CPU random numbers without torch: equal seeds and calls give equal numbers.

All numbers come from one stream of 32-bit words, the MT19937 generator that
`torch.manual_seed` seeds; each method consumes as many words as its torch counterpart.
"""

import math
import threading
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from jaxddp.errors import InputError

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]

FEW = 2**14  # elements that are shuffled one by one
MOST_SWAPS = 2**17  # at once
BLOCK = 16  # torch draws normal numbers in blocks of 16, or one at a time if there are fewer than 16


class Generator:
    """Random number generator equal to `torch.Generator().manual_seed(seed)` on the CPU.

    Methods may be called in any order, as with torch's generator.

    Args:
        seed: -2**63 to 2**64 - 1; only the lower 32 bits are used, as in torch.

    Attributes:
        seed: lower 32 bits of the seed.

    Raises:
        InputError: a seed outside this range.

    Source: PyTorch's ATen/core/DistributionsHelper.h, ATen/native/cpu/DistributionTemplates.h
    and ATen/native/TensorFactories.cpp; the tests compare with torch itself.

    >>> Generator(0).randperm(5)  # torch.manual_seed(0); torch.randperm(5)
    array([4, 0, 1, 3, 2])
    """

    def __init__(self, seed: int) -> None:
        if not -(2**63) <= seed < 2**64:
            raise InputError(f"seed {seed}: must be from -2**63 to 2**64 - 1, as for torch.manual_seed")
        self.seed = seed & 0xFFFFFFFF
        self._stream = np.random.RandomState(self.seed)
        self._spare_normal: float | None = None

    def uniform(self, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0) -> Float32:
        """Draw float32 numbers from U[low, high): `torch.empty(shape).uniform_(low, high)`, bit for bit.

        (word mod 2^24) / 2^24 * (high - low) + low, rounded once, as by torch's fused
        multiply-add on CPUs that have one.

        Raises:
            InputError: low is above high.

        >>> Generator(0).uniform((2,), -1, 1)  # torch.manual_seed(0); torch.empty(2).uniform_(-1, 1)
        array([-0.00748682,  0.5364436 ], dtype=float32)
        """
        if not low <= high:
            raise InputError(f"uniform: low {low} must not be above high {high}")
        low32, high32 = np.float32(low), np.float32(high)
        scaled = self._fractions(math.prod(shape)) * float(high32 - low32) + float(low32)
        return scaled.astype(np.float32).reshape(shape)

    def normal(
        self, shape: tuple[int, ...], mean: float = 0.0, std: float = 1.0, dtype: DTypeLike = np.float32
    ) -> NDArray[Any]:
        """Draw numbers from N(mean, std²): `torch.empty(shape, dtype=dtype).normal_(mean, std)`, to a few ulp.

        Box-Muller: sqrt(-2 ln(1 - u)) times cos(2πv) or sin(2πv). torch evaluates ln, cos and
        sin in float32, differently for each CPU instruction set, so the last bits are not fixed.
        In float64, u and v have 53 bits instead of 24; 16-bit dtypes get rounded float32 numbers.

        Raises:
            InputError: std is below 0.

        >>> Generator(0).normal((2,))  # torch.manual_seed(0); torch.randn(2)
        array([ 1.5409961, -0.2934289], dtype=float32)
        """
        if not std >= 0:
            raise InputError(f"normal: std {std} must be at least 0")
        count = math.prod(shape)
        if count < BLOCK:
            samples = np.array([self._next_normal() for _ in range(count)])
        else:
            wide = np.float64 if dtype == np.float64 else np.float32
            samples = self._normal_blocks(count, wide)
            mean, std = float(wide(mean)), float(wide(std))
        return (samples * std + mean).astype(dtype).reshape(shape)

    def randint(self, low: int, high: int, shape: tuple[int, ...]) -> Int64:
        """Draw int64 numbers from low to high - 1: `torch.randint(low, high, shape)` of torch 2.9 and newer.

        low + word mod (high - low), with 64-bit words if high - low is at least 2^28.

        Raises:
            InputError: the range is empty or exceeds int64.

        >>> Generator(0).randint(0, 10, (5,))  # torch.manual_seed(0); torch.randint(0, 10, (5,))
        array([4, 9, 3, 0, 3])
        """
        if not -(2**63) <= low < high < 2**63:
            raise InputError(f"randint: low {low} must be below high {high}, both within int64")
        count = math.prod(shape)
        words = self._words(count).astype(np.uint64) if high - low < 2**28 else self._long_words(count)
        # Addition modulo 2^64 also works for a negative low.
        offsets = words % np.uint64(high - low) + np.uint64(low % 2**64)
        return offsets.view(np.int64).reshape(shape)

    def random(self, shape: tuple[int, ...]) -> Int64:
        """Draw int64 numbers from 0 to 2^63 - 1: `torch.empty(shape, dtype=torch.int64).random_()`.

        torch's DataLoader draws its seeds this way.

        >>> Generator(0).random((1,))  # torch.manual_seed(0); torch.empty(1, dtype=torch.int64).random_()
        array([900450186894289455])
        """
        words = self._long_words(math.prod(shape)) & np.uint64(2**63 - 1)
        return words.view(np.int64).reshape(shape)

    def randperm(self, n: int) -> Int64:
        """Draw a permutation of 0 to n - 1, int64: `torch.randperm(n)`.

        Raises:
            InputError: see `Permutation`.

        >>> Generator(3).randperm(4)  # torch.manual_seed(3); torch.randperm(4)
        array([2, 3, 1, 0])
        """
        return Permutation(self, n)[:].astype(np.int64)

    def _words(self, count: int) -> NDArray[np.uint32]:
        """Draw the next words of the stream; over the full range, NumPy's `randint` returns them unchanged."""
        return self._stream.randint(0, 2**32, size=count, dtype=np.uint32)

    def _long_words(self, count: int) -> NDArray[np.uint64]:
        """Draw 64-bit words, each of two 32-bit words, the upper half first."""
        high, low = self._words(2 * count).astype(np.uint64).reshape(count, 2).T
        return high << np.uint64(32) | low

    def _fractions(self, count: int, dtype: DTypeLike = np.float32) -> NDArray[np.float64]:
        """Draw uniform numbers from [0, 1) that `dtype` represents exactly."""
        if dtype == np.float64:
            return (self._long_words(count) & np.uint64(2**53 - 1)).astype(np.float64) * 2.0**-53
        return (self._words(count) & 0xFFFFFF).astype(np.float64) * 2.0**-24

    def _next_normal(self) -> float:
        """Draw one standard normal number; they come in pairs, and the second is kept for the next call."""
        if self._spare_normal is not None:
            sample, self._spare_normal = self._spare_normal, None
            return sample
        turn, u = self._fractions(2, np.float64).tolist()
        radius = math.sqrt(-2 * math.log1p(-u))
        self._spare_normal = radius * math.sin(2 * math.pi * turn)
        return radius * math.cos(2 * math.pi * turn)

    def _normal_blocks(self, count: int, dtype: type[np.floating]) -> NDArray[np.float64]:
        """Draw standard normal numbers in blocks of 16; a remainder redraws the last block."""
        fractions = self._fractions(count, dtype)
        samples = np.empty(count)
        in_full_blocks = count - count % BLOCK
        samples[:in_full_blocks] = _box_muller(fractions[:in_full_blocks], dtype)
        if in_full_blocks < count:
            samples[-BLOCK:] = _box_muller(self._fractions(BLOCK, dtype), dtype)
        return samples


class Permutation:
    """`Generator.randperm(n)`, computed from its start only as far as it is used: 78 million take 4 s.

    Fisher-Yates: for i = 0 .. n - 2, swap element i with element i + word mod (n - i). Element i is final after swap
    i. Threads may use a permutation at the same time.

    Args:
        generator: gives the words; other draws from it before the permutation is complete come between them.
        n: number of elements.

    Raises:
        InputError: n is below 0, or so large (214 million) that torch uses another method.

    >>> order = Permutation(Generator(3), 4)
    >>> order[:2], order[np.array([3, 0])], len(order)
    (array([2, 3], dtype=int32), array([0, 2], dtype=int32), 4)
    """

    def __init__(self, generator: Generator, n: int):
        if not 0 <= n < 0xFFFFFFFF // 20:
            more = "; --shuffle index takes more examples" if n > 0 else ""
            raise InputError(f"randperm: n {n} must be from 0 to {0xFFFFFFFF // 20 - 1}{more}")
        self._generator = generator
        self._order = np.arange(n, dtype=np.int32)
        self._done = 0  # swaps
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, places: slice | NDArray[Any]) -> NDArray[np.int32]:
        """Return the elements at `places`, from 0."""
        if isinstance(places, slice):
            last = places.indices(len(self))[1]
        else:
            last = int(places.max()) + 1 if places.size else 0
        self.complete(last)
        return self._order[places]

    def complete(self, count: int) -> None:
        """Compute at least the first `count` elements."""
        while self._done < min(count, len(self) - 1):
            with self._lock:
                if self._done < min(count, len(self) - 1):
                    self._advance()

    def _advance(self) -> None:
        """Make the next swaps: together those that share no element with another of them, then the rest in turn."""
        done, left = self._done, len(self) - self._done
        if left <= FEW:
            partners = self._partners(left - 1) - done
            rest = self._order[done:].tolist()  # in a list, single swaps are faster than in an array
            _swap(rest, np.arange(left - 1), partners)
            self._order[done:] = rest
            self._done = len(self)
            return
        count = min(left // 256, MOST_SWAPS)  # 1 or 2 in a hundred share an element
        partners = self._partners(count)
        places = np.arange(done, done + count)
        by_partner = np.argsort(partners)
        again = np.flatnonzero(np.diff(partners[by_partner]) == 0)
        near = partners < done + count
        shared = near.copy()
        shared[partners[near] - done] = True
        shared[by_partner[again]] = shared[by_partner[again + 1]] = True
        alone = ~shared
        first, second = places[alone], partners[alone]
        self._order[first], self._order[second] = self._order[second], self._order[first]
        _swap(self._order, places[shared], partners[shared])
        self._done += count

    def _partners(self, count: int) -> Int64:
        places = np.arange(self._done, self._done + count)
        return places + self._generator._words(count) % (len(self) - places)


def _box_muller(fractions: NDArray[np.float64], dtype: type[np.floating]) -> NDArray[np.float64]:
    """Turn blocks of 16, 8 radii and 8 angles, into 8 cosine and 8 sine samples."""
    u, turns = np.split(fractions.reshape(-1, BLOCK), 2, axis=1)
    radius = np.sqrt(-2 * np.log(1 - u))
    # torch rounds the angle to the dtype, which changes every digit where cosine or sine is near 0.
    angle = np.multiply(turns, 2 * math.pi, dtype=dtype).astype(np.float64)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1).ravel()


def linear_init(
    generator: Generator, in_features: int, out_features: int, bias: bool = True
) -> tuple[Float32, Float32 | None]:
    """Draw the initial parameters of `torch.nn.Linear`, bit for bit, from U(-b, b) with b = in_features^-1/2.

    Returns:
        weight (out_features, in_features) and bias (out_features,) or None, float32.

    Raises:
        InputError: a size below 1.

    >>> weight, bias = linear_init(Generator(0), 4, 2)
    >>> weight.shape, bias.shape
    ((2, 4), (2,))
    """
    return _fan_in_uniform(generator, (out_features, in_features), bias)


def conv_init(
    generator: Generator,
    in_channels: int,
    out_channels: int,
    kernel_size: tuple[int, ...],
    groups: int = 1,
    bias: bool = True,
) -> tuple[Float32, Float32 | None]:
    """Draw the initial parameters of `torch.nn.Conv1d`, `Conv2d` and `Conv3d`, bit for bit.

    Both parameters come from U(-b, b) with b = (in_channels / groups * prod(kernel_size))^-1/2.

    Returns:
        weight (out_channels, in_channels / groups, *kernel_size) and bias (out_channels,) or
        None, float32.

    Raises:
        InputError: a size below 1, or channels that are not divisible by `groups`.

    >>> weight, bias = conv_init(Generator(0), 1, 16, (3, 3), bias=False)
    >>> weight.shape, bias
    ((16, 1, 3, 3), None)
    """
    if groups < 1 or in_channels % groups or out_channels % groups:
        raise InputError(f"groups {groups}: must divide in_channels {in_channels} and out_channels {out_channels}")
    return _fan_in_uniform(generator, (out_channels, in_channels // groups, *kernel_size), bias)


def embedding_init(generator: Generator, num_embeddings: int, dim: int) -> Float32:
    """Draw the initial weight (num_embeddings, dim) of `torch.nn.Embedding`, float32 N(0, 1), to a few ulp.

    Raises:
        InputError: a size below 1.

    >>> embedding_init(Generator(0), 27, 10).shape
    (27, 10)
    """
    _check_sizes((num_embeddings, dim))
    return generator.normal((num_embeddings, dim))


def _fan_in_uniform(generator: Generator, weight_shape: tuple[int, ...], bias: bool) -> tuple[Float32, Float32 | None]:
    """Draw a Kaiming-uniform weight with torch's a = sqrt(5), and its bias."""
    _check_sizes(weight_shape)
    fan_in = math.prod(weight_shape[1:])
    # Equal to fan_in^-1/2 in exact arithmetic; torch's order of operations keeps the last bit.
    gain = math.sqrt(2 / (1 + math.sqrt(5) ** 2))
    bound = math.sqrt(3) * (gain / math.sqrt(fan_in))
    weight = generator.uniform(weight_shape, -bound, bound)
    if not bias:
        return weight, None
    bound = 1 / math.sqrt(fan_in)
    return weight, generator.uniform(weight_shape[:1], -bound, bound)


def _check_sizes(shape: tuple[int, ...]) -> None:
    if min(shape) < 1:
        raise InputError(f"layer sizes {shape}: each must be at least 1")


def _swap(order: Any, places: Int64, partners: Int64) -> None:
    """Swap the elements at each place and its partner, in place, one pair after the other."""
    for i, j in zip(places.tolist(), partners.tolist(), strict=True):
        order[i], order[j] = order[j], order[i]
