"""Threefry in torch_ref equals jax's random numbers, bit for bit."""

import jax
import numpy as np
import pytest

from torch_ref import threefry

SEEDS = (0, 7, 2**31, 2**32 - 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_keys_equal_jaxs(seed: int) -> None:
    ours, theirs = threefry.key(seed), jax.random.key(seed)
    np.testing.assert_array_equal(ours, jax.random.key_data(theirs))
    np.testing.assert_array_equal(threefry.key(seed + 2**40), ours)
    for number in (0, 1, 5, *SEEDS):
        folded = threefry.fold_in(ours, number)
        np.testing.assert_array_equal(folded, jax.random.key_data(jax.random.fold_in(theirs, number)))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 3, 4), (1025,)])
def test_bits_equal_jaxs(shape: tuple[int, ...]) -> None:
    for seed in SEEDS:
        words = threefry.bits(threefry.key(seed), shape)
        assert words.shape == shape and words.dtype == np.uint32
        np.testing.assert_array_equal(words, jax.random.bits(jax.random.key(seed), shape, "uint32"))


def test_the_cipher_gives_the_known_answers_of_random123() -> None:
    """Encrypt counters of all zeros, all ones, and digits of pi."""
    ones, key = np.uint32(0xFFFFFFFF), np.array([0x13198A2E, 0x03707344], np.uint32)
    for words, counters, expected in (
        (np.zeros(2, np.uint32), (0, 0), (0x6B200159, 0x99BA4EFE)),
        (np.full(2, ones), (ones, ones), (0x1CB996FC, 0xBB002BE7)),
        (key, (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ):
        blocks = (np.array([counter], np.uint32) for counter in counters)
        assert [int(x[0]) for x in threefry.threefry2x32(words, *blocks)] == list(expected)
