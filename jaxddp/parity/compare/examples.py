"""Describe where and how the examples of two batches differ."""

from collections.abc import Sequence

import numpy as np

from jaxddp.errors import listed
from jaxddp.parity.fingerprints import Fingerprints, identifying, together
from jaxddp.parity.records import NO_EXAMPLE

SHOWN = 4  # rows and replicas listed


def examples_in_words(expected: Fingerprints, mapped: Fingerprints) -> str:
    """Describe which entries, replicas and rows of a batch differ, and by what rule if there is one.

    Args:
        expected, mapped: entry of the batch -> fingerprints of torch's and of jax's examples, (world_size, examples).

    >>> torch = {"x": np.arange(8).reshape(2, 4), "y": np.arange(10, 18).reshape(2, 4)}
    >>> examples_in_words(torch, torch | {"y": np.roll(torch["y"], 1, axis=1)})
    '"y" of all replicas, all rows: rolled by 1 row'
    >>> other = torch["x"].copy()
    >>> other[1, [0, 2]] = 20, 21
    >>> examples_in_words(torch, torch | {"x": other})
    '"x" of replica 1, rows 0, 2: other values'
    """
    expected, mapped = identifying(expected, mapped)
    same_names = expected.keys() == mapped.keys()
    of_sides = [next(iter(side.values())) for side in (expected, mapped)]
    if of_sides[0].shape != of_sides[1].shape:
        sizes = ["at most " * bool((x == NO_EXAMPLE).any()) + f"{x.shape[1]}" for x in of_sides]
        return f"{sizes[1]} examples per replica in jax, {sizes[0]} in torch"
    entries = [name for name in expected if same_names and (expected[name] != mapped[name]).any()]
    of_torch, of_jax = together(expected, entries), together(mapped, entries)
    what = " and ".join(f'"{name}"' for name in entries) if 0 < len(entries) < len(expected) else "the examples"
    (replicas,) = np.nonzero((of_torch != of_jax).any(1))
    (rows,) = np.nonzero((of_torch != of_jax).any(0))
    where = f"{_counted('replica', replicas, len(of_torch))}, {_counted('row', rows, of_torch.shape[1])}"
    return f"{what} of {where}: {_rule(of_torch, of_jax, replicas)}"


def _counted(kind: str, numbers: np.ndarray, count: int) -> str:
    """List numbers out of `count`, or say "all".

    >>> [_counted("row", np.array(rows), 3) for rows in ([0, 1, 2], [1], [0, 2])]
    ['all rows', 'row 1', 'rows 0, 2']
    """
    if len(numbers) == count > 1:
        return f"all {kind}s"
    return f"{kind}{'s' * (len(numbers) > 1)} {listed([str(n) for n in numbers], SHOWN, ', ')}"


def _rule(torch: np.ndarray, jax: np.ndarray, replicas: Sequence[int] | np.ndarray) -> str:
    """Describe how jax's examples on the differing replicas, (world_size, examples), follow from torch's."""
    expected, mapped = torch[replicas], jax[replicas]
    size = expected.shape[1]
    for rows in range(1, size):
        if np.array_equal(mapped, np.roll(expected, rows, axis=1)):
            by = min((rows, rows - size), key=abs)
            return f"rolled by {by} row{'s' * (abs(by) > 1)}"
    if size > 1 and np.array_equal(mapped[:, :-1], expected[:, 1:]):
        return "each row has the next one's values"
    if size > 1 and np.array_equal(mapped[:, 1:], expected[:, :-1]):
        return "each row has the values of the one before"
    if np.array_equal(np.sort(mapped, axis=1), np.sort(expected, axis=1)):
        return "the same rows in another order"
    if np.array_equal(np.sort(jax, axis=None), np.sort(torch, axis=None)):
        return "the same examples, dealt to the replicas in another way"
    return "other values"
