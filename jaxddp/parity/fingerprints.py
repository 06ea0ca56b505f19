"""Fingerprints, which tell whether two loaders yield the same examples.

Two loaders may use different names, dtypes or layouts (NCHW, NHWC) for an example, so values are hashed in float32,
and the values of an example with several axes are sorted first.
"""

from collections.abc import Mapping, Sequence

import numpy as np

Fingerprints = Mapping[str, np.ndarray]  # entry of a batch -> one number per example
IDS = "ids"  # entry of a batch that identifies its examples; no values are hashed then


def fingerprints(micro_batches: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Compute one number per example and entry of a replica's batch.

    Args:
        micro_batches: A micro-batches, arrays by name, shapes (B, ...).

    Returns:
        entry -> uint64, shape (A B,); the entry "ids" alone, unhashed, if there is one.

    >>> image = np.arange(6.0).reshape(1, 2, 3)
    >>> first, second = fingerprints([{"x": image}]), fingerprints([{"x": image.transpose(0, 2, 1).astype("f4")}])
    >>> first["x"] == second["x"], fingerprints([{"ids": np.array([3, 1]), "x": np.ones(2)}])
    (array([ True]), {'ids': array([3, 1], dtype=uint64)})
    """
    whole = {name: np.concatenate([batch[name] for batch in micro_batches]) for name in micro_batches[0]}
    if IDS in whole:
        return {IDS: whole[IDS].astype(np.uint64)}
    return {name: _hashed(array) for name, array in whole.items()}


def differing_share(a: Fingerprints, b: Fingerprints) -> float:
    """Return the share of examples, over all replicas, that differ between two batches; order counts.

    Args:
        a, b: entry of the batch -> fingerprints, shape (world_size, examples). If the names of the entries
            differ, all entries together identify an example.

    >>> a, b = {"x": np.array([[1, 2], [3, 4]])}, {"x": np.array([[1, 2], [3, 5]])}
    >>> differing_share(a, b), differing_shares(a, b)
    (0.25, [0.0, 0.5])
    """
    if a.keys() != b.keys():
        a, b = {"": together(a)}, {"": together(b)}
    if any(a[name].shape != b[name].shape for name in a):
        return 1.0
    return float(np.mean(np.logical_or.reduce([a[name] != b[name] for name in a])))


def differing_shares(a: Fingerprints, b: Fingerprints) -> list[float]:
    """Return `differing_share` of each replica."""
    replicas = min(len(values) for values in (*a.values(), *b.values()))

    def of_replica(batch: Fingerprints, rank: int) -> Fingerprints:
        return {name: values[rank : rank + 1] for name, values in batch.items()}

    return [differing_share(of_replica(a, rank), of_replica(b, rank)) for rank in range(replicas)]


def together(batch: Fingerprints, entries: Sequence[str] = ()) -> np.ndarray:
    """Return one fingerprint per example for several entries of a batch; for all entries by default."""
    return np.add.reduce([batch[name] for name in entries or batch])


def _hashed(array: np.ndarray) -> np.ndarray:
    """Hash each row's values; sort them first where a row has several axes, whose order may differ."""
    with np.errstate(over="ignore"):  # float64's lowest number, common in masks, overflows float32
        rows = array.reshape(len(array), -1).astype(np.float32) + np.float32(0)  # -0.0 is 0.0
    if array.ndim > 2:
        rows = np.sort(rows, axis=1)
    bits = rows.view(np.uint32).astype(np.uint64)
    weights = np.random.default_rng(0).integers(1, 2**63, bits.shape[1], dtype=np.uint64) | np.uint64(1)
    mixed = (bits ^ (bits >> np.uint64(7))) * weights  # wraps around
    return np.bitwise_xor.reduce(mixed ^ (mixed >> np.uint64(29)), axis=1, initial=np.uint64(0)) + mixed.sum(1)
