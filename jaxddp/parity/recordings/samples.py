"""Give the examples of both sides numbers that are equal for equal examples, whatever their layout and rounding."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxddp.errors import listed
from jaxddp.parity.recorder.batches import HASH, PLAIN, SORTED
from jaxddp.parity.recordings.run import RecordedStep

# Distance of the projections of one example on both sides, relative to their size, in units of the precision: one
# side may normalise in float32 and the other in float64; measured: up to 2.
NEAR = 100.0

Numbers = list[dict[str, np.ndarray]]  # step -> entry -> (replicas, examples)


def numbered(
    torch: Sequence[RecordedStep], jax: Sequence[RecordedStep], replicas: int, epsilon: float
) -> tuple[Numbers, Numbers]:
    """Return the examples of both sides as numbers, under torch's names of the entries where these pair off.

    Args:
        torch, jax: the same steps of both sides.
        replicas: number of replicas to share each step's examples among, where the two sides' numbers differ.
        epsilon: precision of the less precise side.
    """
    of_torch: Numbers = [{} for _ in torch]
    of_jax: Numbers = [{} for _ in jax]
    for entry, other in _pairs(_entries(torch), _entries(jax)).items():
        kind = _kind(entry, other, torch, jax)
        one = [_rows(step["samples"][f"{entry}:{kind}"], replicas) for step in torch]
        two = [_rows(step["samples"][f"{other}:{kind}"], replicas) for step in jax]
        if kind != HASH:
            one, two = _near(one, two, NEAR * epsilon)
        for numbers, name, values in ((of_torch, entry, one), (of_jax, entry, two)):
            for of_step, x in zip(numbers, values, strict=True):
                of_step[name] = x
    return of_torch, of_jax


def dealt_otherwise(torch: RecordedStep, jax: RecordedStep) -> str:
    """Describe how many examples the replicas of both sides have, if unequal and not the same; "": they are."""
    sizes = torch.sizes, jax.sizes
    if len(sizes[0]) != len(sizes[1]) or sizes[0] == sizes[1] or max(map(len, map(set, sizes))) == 1:
        return ""
    torch_sizes, jax_sizes = (listed([*map(str, of_side)], 8, ", ") for of_side in sizes)
    return f"{torch_sizes} examples in torch, {jax_sizes} in jax"


def _entries(steps: Sequence[RecordedStep]) -> dict[str, Sequence[object]]:
    """Return the entries, as the first step describes them, that identify the examples of every step."""
    shown = [{key.rpartition(":")[0] for key in step["samples"] if key.endswith(HASH)} for step in steps]
    described = set.intersection(*shown, *(set(step.notes["entries"]) for step in steps))
    return {name: entry for name, entry in steps[0].notes["entries"].items() if name in described}


def _pairs(torch: Mapping[str, Sequence[object]], jax: Mapping[str, Sequence[object]]) -> dict[str, str]:
    """Pair the entries of a batch by name, or else the floating-point ones and the integers in their order.

    >>> _pairs({"0": [[8, 3], "float32"], "1": [[8], "int64"]}, {"y": [[8], "int32"], "x": [[8, 3], "float32"]})
    {'0': 'x', '1': 'y'}
    """
    if torch.keys() == jax.keys():
        return {name: name for name in torch}
    pairs: dict[str, str] = {}
    for is_float in (True, False):
        sides = [[n for n, (_, dtype) in of.items() if ("float" in str(dtype)) == is_float] for of in (torch, jax)]
        pairs |= dict(zip(*sides, strict=False))
    return {name: pairs[name] for name in torch if name in pairs}


def _kind(entry: str, other: str, torch: Sequence[RecordedStep], jax: Sequence[RecordedStep]) -> str:
    """Return what identifies the examples of an entry: exact values, or projections of plain or of sorted values."""
    sides = (entry, torch), (other, jax)
    if any(f"{name}:{PLAIN}" not in step["samples"] for name, steps in sides for step in steps):
        return HASH
    shapes = [steps[0].notes["entries"][name][0][1:] for name, steps in sides]
    return PLAIN if shapes[0] == shapes[1] else SORTED


def _rows(x: np.ndarray, replicas: int) -> np.ndarray:
    """Share a step's examples among this many replicas, if their number allows it."""
    examples = x.shape[0] * x.shape[1]
    rows = replicas if examples % replicas == 0 else 1
    return x if len(x) == rows else x.reshape(rows, examples // rows, *x.shape[2:])


def _near(torch: list[np.ndarray], jax: list[np.ndarray], within: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Number projections: equal ones of torch alike, and those of JAX as the nearest of torch, if one is near."""
    known, number = np.unique(_flat(torch), axis=0, return_inverse=True)
    of_torch = number.ravel().astype(np.uint64)
    others = _flat(jax)
    scale = float(np.sqrt(np.mean(known**2))) if known.size else 0.0
    nearest = _nearest(known, others, within * scale)
    _, own = np.unique(others, axis=0, return_inverse=True)
    of_jax = np.where(nearest >= 0, nearest, len(known) + own.ravel()).astype(np.uint64)
    return _shaped(of_torch, torch), _shaped(of_jax, jax)


def _flat(of_steps: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([x.reshape(-1, x.shape[-1]) for x in of_steps])


def _nearest(known: np.ndarray, rows: np.ndarray, within: float) -> np.ndarray:
    """Return the place in `known`, sorted by its first column, of the row nearest to each; -1: none is near enough."""
    found = np.full(len(rows), -1, np.int64)
    low = np.searchsorted(known[:, 0], rows[:, 0] - within, "left")
    high = np.searchsorted(known[:, 0], rows[:, 0] + within, "right")
    for place, row in enumerate(rows):
        candidates = known[low[place] : high[place]]
        if len(candidates):
            apart = np.abs(candidates - row).max(axis=1)
            best = int(np.argmin(apart))
            if apart[best] <= within:
                found[place] = low[place] + best
    return found


def _shaped(numbers: np.ndarray, like: list[np.ndarray]) -> list[np.ndarray]:
    ends = np.cumsum([x.shape[0] * x.shape[1] for x in like])
    return [part.reshape(x.shape[:2]) for part, x in zip(np.split(numbers, ends[:-1]), like, strict=True)]


def sizes_of(step: RecordedStep, replicas: int) -> dict[int, str]:
    """Return the factors by which a sum over a batch may differ from a mean, each with the axes that it counts."""
    entries = [*step.notes["entries"].values()]
    if not entries:
        return {}
    pieces, examples = int(step.notes["micro_batches"]), int(entries[0][0][0])
    pairs = [(replicas, "the replicas"), (replicas * pieces * examples, "the batches of all replicas")]
    pairs += [(pieces, "the micro-batches"), (pieces * examples, "the batch"), (examples, "the batch")]
    for shape, dtype in entries:
        if len(shape) > 1:
            words = f"axis 1 of {len(shape)}" if "float" in str(dtype) else "the sequence"
            pairs += [(int(shape[1]), words), (examples * int(shape[1]), f"the batch and {words}")]
    return {size: words for size, words in reversed(pairs) if size > 1}
