"""Compare what both sides compute of the batches of an evaluation."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxddp.config.choices import COUNT_OF
from jaxddp.parity.compare.residuals import norm, residuals
from jaxddp.parity.port.evaluation import PREDICT, Evaluated

ALLOWED = 1e-12  # of an output or a metric, in float64; measured: up to 4e-16


@dataclass(frozen=True)
class Output:
    """Comparison of an output of `predict`, of a loss or of a metric.

    Attributes:
        residual: ||jax - torch|| over ||torch||, of all batches.
        of_batches: residual of each batch.
        differing, examples: number of examples that differ, and of all; 0 where an output has no row for each.
    """

    residual: float
    of_batches: tuple[float, ...]
    differing: int = 0
    examples: int = 0

    def only_last(self, allowed: float) -> bool:
        """Return whether only the last batch differs."""
        *others, last = self.of_batches
        return bool(others) and max(others) <= allowed < last


def compared(torch: Sequence[Evaluated], jax: Sequence[Evaluated]) -> dict[str, Output]:
    """Compare each output and each metric that both sides have for the same batches.

    An output may have its axes in another order: channels last, or the first two swapped.

    >>> def side(*rows): return [Evaluated("", len(x), outputs={"predict": np.array(x)}) for x in rows]
    >>> compared(side([1.0, 2.0], [2.0]), side([1.0, 2.0], [3.5]))
    {'predict': Output(residual=0.5, of_batches=(0.0, 0.5), differing=1, examples=3)}
    """
    results: dict[str, Output] = {}
    pairs = list(zip(torch, jax, strict=True))
    for test_set in dict.fromkeys(of_torch.test_set for of_torch in torch):
        of_set = [pair for pair in pairs if pair[0].test_set == test_set]
        results |= {f"{test_set}{name}": output for name, output in _outputs(of_set)}
        results |= {f"{test_set}{name}": output for name, output in _metrics(of_set)}
    return results


def padded(jax: Sequence[Evaluated]) -> list[Evaluated]:
    """Return what jax computes of its batches as the trainer fills them up, without outputs; [] if it fills up none."""
    filled = [Evaluated(x.test_set, x.size, sums=x.padded or x.sums) for x in jax]
    return filled if any(x.padded for x in jax) else []


def not_compared(torch: Sequence[Evaluated], jax: Sequence[Evaluated]) -> dict[str, str]:
    """Return why parts of the evaluation, "predict" or metrics, were not compared.

    >>> raising = Evaluated("", 2, errors={"predict": "raises port.py: line 3: KeyError: 'z'"})
    >>> not_compared([Evaluated("", 2, outputs={"predict": np.ones(2)})], [raising])
    {'predict': "jax raises port.py: line 3: KeyError: 'z'"}
    """
    reasons: dict[str, str] = {}
    for of_torch, of_jax in zip(torch, jax, strict=True):
        for part in ("predict", "metrics"):
            errors = [(side, x.errors[part]) for side, x in (("torch", of_torch), ("jax", of_jax)) if part in x.errors]
            if errors:
                reasons.setdefault(part, " and ".join(f"{side} {why}" for side, why in errors))
        if PREDICT not in reasons:
            a, b = (sorted(f"{name} {x.shape}" for name, x in side.outputs.items()) for side in (of_torch, of_jax))
            if any(_aligned(x, of_jax.outputs.get(name)) is None for name, x in of_torch.outputs.items()):
                reasons[PREDICT] = f"torch returns {', '.join(a)} and jax {', '.join(b) or 'no array'}"
        if "metrics" not in reasons and (odd := sorted((of_torch.sums.keys() ^ of_jax.sums.keys()) - {"count"})):
            names = [name for name in odd if not name.startswith(COUNT_OF)]
            reasons |= {"metrics": f"only one side has {', '.join(names)}"} if names else {}
    return reasons


def _outputs(pairs: Sequence[tuple[Evaluated, Evaluated]]) -> Iterator[tuple[str, Output]]:
    for name in dict.fromkeys(name for of_torch, _ in pairs for name in of_torch.outputs):
        arrays = [*_aligned_pairs(pairs, name)]
        if not arrays:
            continue
        of_torch = {f"{index}": x for index, (_, x, _) in enumerate(arrays)}
        of_jax = {f"{index}": y for index, (_, _, y) in enumerate(arrays)}
        of_batches = residuals(of_jax, of_torch)
        scale = math.hypot(*map(norm, of_torch.values()))
        residual, parts = math.hypot(*of_batches.values()), tuple(of_batches.values())
        if not all(x.ndim and len(x) == size for size, x, _ in arrays):
            yield name, Output(residual, parts)
            continue
        rows = (_differing_rows(x, y, scale) for _, x, y in arrays)
        yield name, Output(residual, parts, sum(rows), sum(size for size, *_ in arrays))


def _aligned_pairs(
    pairs: Sequence[tuple[Evaluated, Evaluated]], name: str
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    for of_torch, of_jax in pairs:
        if name in of_torch.outputs and (y := _aligned(of_torch.outputs[name], of_jax.outputs.get(name))) is not None:
            yield of_torch.size, of_torch.outputs[name], y


def _aligned(torch: np.ndarray, jax: np.ndarray | None) -> np.ndarray | None:
    """Return jax's output in torch's layout; None: it has none.

    Rows that jax lacks are NaN.

    >>> _aligned(np.zeros((2, 3, 4)), np.zeros((2, 4, 3))).shape, _aligned(np.zeros((2, 3)), np.zeros((3, 2)))
    ((2, 3, 4), None)
    >>> _aligned(np.zeros(2), np.zeros(1))
    array([ 0., nan])
    """
    if jax is None:
        return None
    if jax.ndim and torch.ndim and jax.shape[1:] == torch.shape[1:] and len(jax) < len(torch):
        return np.concatenate([jax, np.full((len(torch) - len(jax), *jax.shape[1:]), np.nan)])
    axes = tuple(range(jax.ndim))
    orders = [axes, (0, jax.ndim - 1, *axes[1:-1]), (1, 0, *axes[2:])] if jax.ndim > 2 else [axes]
    layouts = [jax.transpose(order) for order in dict.fromkeys(orders)]
    if [n for n in jax.shape if n > 1] == [n for n in torch.shape if n > 1]:
        layouts.append(jax.reshape(torch.shape))
    fitting = [x for x in layouts if x.shape == torch.shape]
    return min(fitting, key=lambda x: norm(np.asarray(x, float) - torch), default=None)


def _differing_rows(torch: np.ndarray, jax: np.ndarray, scale: float) -> int:
    distance = np.where((jax == torch) | (np.isnan(jax) & np.isnan(torch)), 0.0, np.asarray(jax, float) - torch)
    return int(np.sum(~(np.linalg.norm(distance.reshape(len(torch), -1), axis=1) <= ALLOWED * scale)))


def _metrics(pairs: Sequence[tuple[Evaluated, Evaluated]]) -> Iterator[tuple[str, Output]]:
    both = [(of_torch.sums, of_jax.sums) for of_torch, of_jax in pairs if of_torch.sums and of_jax.sums]
    of_torch, of_jax = ([_total([pair[side] for pair in both]), *(pair[side] for pair in both)] for side in (0, 1))
    means = [(_means(a), _means(b)) for a, b in zip(of_torch, of_jax, strict=True)]
    for name in (name for name in means[0][0] if name in means[0][1]):
        residual, *of_batches = (_relative(a[name], b[name]) for a, b in means if name in a and name in b)
        yield name, Output(residual, tuple(of_batches))


def _relative(torch: float, jax: float) -> float:
    return residuals({"": np.array(jax)}, {"": np.array(torch)})[""]


def _total(of_batches: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for sums in of_batches for name in sums)
    return {name: math.fsum(sums.get(name, 0.0) for sums in of_batches) for name in names}


def _means(sums: Mapping[str, float]) -> dict[str, float]:
    """Divide each sum by its count, like both trainers.

    >>> _means({"loss": 6.0, "count": 3.0, "error": 1.0, "count:error": 4.0})
    {'loss': 2.0, 'error': 0.25}
    """
    names = [name for name in sums if name != "count" and not name.startswith(COUNT_OF)]
    counts = {name: sums.get(f"{COUNT_OF}{name}", sums.get("count", 0.0)) for name in names}
    return {name: sums[name] / counts[name] if counts[name] else math.nan for name in names}
