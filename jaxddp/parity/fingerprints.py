"""Fingerprints, which tell whether two loaders yield the same examples.

Two loaders may use different names, dtypes or layouts (NCHW, NHWC) for an example, so values are hashed in float32,
and the values of an example with several axes are sorted first.
"""

from collections.abc import Mapping, Sequence

import numpy as np

NUMBERS = "biuf"  # kinds of dtypes that are hashed
Fingerprints = Mapping[str, np.ndarray]  # entry of a batch -> one number per example
# Entry of a batch that identifies its examples if it is a vector of one integer for each; their values may differ then,
# but not change places.
IDS = "ids"
ENTRY_IDS = "ids (an entry)"  # fingerprints of any other array of that name, such as a text's tokens


def fingerprints(micro_batches: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Compute one number per example and entry of a replica's batch.

    Args:
        micro_batches: A micro-batches, arrays by name, shapes (B, ...).

    Returns:
        entry -> uint64, shape (A B,); of an integer for each example, "ids", the integers themselves. Entries that have
        no numbers for each example are left out.

    >>> image = np.arange(6.0).reshape(1, 2, 3)
    >>> first, second = fingerprints([{"x": image}]), fingerprints([{"x": image.transpose(0, 2, 1).astype("f4")}])
    >>> first["x"] == second["x"], fingerprints([{"ids": np.array([3, 1]), "y": np.zeros(2)}])["ids"]
    (array([ True]), array([3, 1], dtype=uint64))
    >>> [*fingerprints([{"ids": np.array([[3, 1], [4, 1]]), "y": np.zeros(2)}])]
    ['ids (an entry)', 'y']
    >>> [*fingerprints([{"ids": np.array([3, 1]), "edges": np.ones((5, 2))}])]
    ['edges']
    """
    whole = {name: np.concatenate([batch[name] for batch in micro_batches]) for name in micro_batches[0]}
    size = number_of_examples(whole)
    of_examples = {name: x for name, x in whole.items() if len(x) == size and x.dtype.kind in NUMBERS}
    if (ids := of_examples.get(IDS)) is not None and ids.ndim == 1 and ids.dtype.kind in "iu":
        return {name: ids.astype(np.uint64) if name == IDS else _hashed(x) for name, x in of_examples.items()}
    return {ENTRY_IDS if name == IDS else name: _hashed(x) for name, x in of_examples.items()}


def number_of_examples(batch: Mapping[str, np.ndarray]) -> int:
    """Return the length that all entries but "ids" share; if they have several lengths, that of the first entry.

    >>> number_of_examples({"ids": np.arange(2), "edges": np.ones((5, 2))})
    5
    """
    lengths = {len(x) for name, x in batch.items() if name != IDS}
    return lengths.pop() if len(lengths) == 1 else len(next(iter(batch.values())))


def identifying(a: Fingerprints, b: Fingerprints) -> tuple[Fingerprints, Fingerprints]:
    """Return two batches without the entries that do not identify examples.

    Ids identify examples. Any other entry does so if each replica has the same values on both sides, in any order.

    >>> a = {"ids": np.array([[0, 1]]), "x": np.array([[5, 6]]), "y": np.array([[8, 9]])}
    >>> [*identifying(a, a | {"x": np.array([[5, 7]]), "y": np.array([[9, 8]])})[0]]
    ['ids', 'y']
    """
    if IDS not in a or IDS not in b:
        return a, b
    others = [name for name in a if name in b and name != IDS and a[name].shape == b[name].shape]
    kept = [IDS, *(name for name in others if np.array_equal(np.sort(a[name]), np.sort(b[name])))]
    return {name: a[name] for name in kept}, {name: b[name] for name in kept}


def differing_share(a: Fingerprints, b: Fingerprints) -> float:
    """Return the share of examples, over all replicas, that differ between two batches; order counts.

    Args:
        a, b: entry of the batch -> fingerprints, shape (world_size, examples). If the names of the entries
            differ, all entries together identify an example.

    >>> a, b = {"x": np.array([[1, 2], [3, 4]])}, {"x": np.array([[1, 2], [3, 5]])}
    >>> differing_share(a, b), differing_shares(a, b)
    (0.25, [0.0, 0.5])
    """
    a, b = identifying(a, b)
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
