"""What a step tells of its gradients, as numbers among its metrics; this knows neither jax nor torch.

grad_norm/NAME      the norm of a parameter's mean gradient
grad_log2/NAME/K    how many of its elements have 2^K <= |g| < 2^(K+1); the first K counts all below, zeros too,
                    and the last all above
anomaly/RANK/CHUNK  which local gradients of a replica are not finite: a digit for each of eight parameters,
                    in the order of their names
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxddp.errors import TrainingError

NORM, LOG2, ANOMALY = "grad_norm/", "grad_log2/", "anomaly/"
LOG2_BINS = range(-32, 9)
CHUNK, BASE = 8, 4  # 16 bits, which float32 holds exactly
KINDS = {1: "infinite", 2: "NaN"}  # what the digits say; 0: finite
HINT = "--detect-anomaly tells the parameter and the replica"


def of_gradients(name: str) -> bool:
    """Whether a metric is one of these, and so no sum over examples.

    >>> of_gradients("grad_norm/fc.weight"), of_gradients("loss")
    (True, False)
    """
    return name.startswith((NORM, LOG2, ANOMALY))


def renamed(sums: Mapping[str, float], shown: Callable[[str], str]) -> dict[str, float]:
    """Metrics with the parameters in them called otherwise.

    >>> list(renamed({"loss": 1.0, "grad_norm/a": 2.0, "grad_log2/a/-3": 3.0}, str.upper))
    ['loss', 'grad_norm/A', 'grad_log2/A/-3']
    """

    def column(name: str) -> str:
        kind, _, rest = name.partition("/")
        if name.startswith(NORM):
            return f"{kind}/{shown(rest)}"
        if name.startswith(LOG2):
            parameter, _, k = rest.rpartition("/")
            return f"{kind}/{shown(parameter)}/{k}"
        return name

    return {column(name): value for name, value in sums.items()}


def norms(sums: Mapping[str, float]) -> dict[str, float]:
    """The norms among a step's metrics, "grad_norm/NAME"."""
    return {name: float(value) for name, value in sums.items() if name.startswith(NORM)}


def histograms(sums: Mapping[str, float]) -> dict[str, list[int]]:
    """The histograms among metrics, of one step or added up over several: NAME -> a count for each of LOG2_BINS.

    >>> histograms({"loss": 1.0} | {f"grad_log2/fc.weight/{k}": float(k == -3) for k in LOG2_BINS})["fc.weight"][29]
    1
    """
    found: dict[str, list[int]] = {}
    for column, count in sums.items():
        if column.startswith(LOG2):
            name, _, k = column.removeprefix(LOG2).rpartition("/")
            found.setdefault(name, [0] * len(LOG2_BINS))[LOG2_BINS.index(int(k))] = round(count)
    return found


def anomalies(sums: Mapping[str, float], names: Iterable[str]) -> dict[int, dict[str, str]]:
    """Replica -> parameter -> "NaN" or "infinite", of the local gradients of a step that are not finite.

    Args:
        names: of the parameters that learn.

    >>> anomalies({"loss": 1.0, "anomaly/0/0": 0.0, "anomaly/1/0": 2 * 4.0}, ["fc.weight", "fc.bias"])
    {1: {'fc.weight': 'NaN'}}
    """
    names = sorted(names)
    found: dict[int, dict[str, str]] = {}
    for column, value in sums.items():
        if column.startswith(ANOMALY) and value:
            rank, chunk = map(int, column.removeprefix(ANOMALY).split("/"))
            for place, name in enumerate(names[chunk * CHUNK : (chunk + 1) * CHUNK]):
                if digit := round(value) // BASE**place % BASE:
                    found.setdefault(rank, {})[name] = KINDS[digit]
    return found


def check_finite(sums: Mapping[str, float], step: int, anomaly: str | None) -> None:
    """Raise `TrainingError` for a step whose loss or gradients are not finite, unless a loss scaler has skipped it.

    Args:
        sums: its metrics; also raised for a loss scale of 0.
        anomaly: what is known of gradients that are not finite; "" if they all are, None if nobody has looked.

    >>> check_finite({"loss": math.inf}, 3, None)
    Traceback (most recent call last):
    ...
    jaxddp.errors.TrainingError: loss is inf at step 3; --detect-anomaly tells the parameter and the replica
    """
    loss = sums["loss"]
    if sums.get("scale") == 0:
        raise TrainingError(f"every step overflows: the loss scale is 0 at step {step}")
    if sums.get("skipped"):
        return
    if not math.isfinite(loss):
        told = HINT if anomaly is None else anomaly or "every gradient is finite"
        raise TrainingError(f"loss is {loss} at step {step}; {told}")
    if anomaly:
        raise TrainingError(f"{anomaly} at step {step}, with a loss of {loss:g}")


def explained(sums: Mapping[str, float], order: Sequence[str], shown: Callable[[str], str] = str) -> str:
    """What a step's metrics say of gradients that are not finite; "" if all are.

    Args:
        order: the names of the parameters that learn, as the model has them, from its input to its output.
        shown: name -> what it is called for the reader.
    """
    found = anomalies(sums, order)
    called = {rank: {shown(name): kind for name, kind in of_rank.items()} for rank, of_rank in found.items()}
    return described(called, [shown(name) for name in order]) if found else ""


def described(found: Mapping[int, Mapping[str, str]], order: Sequence[str]) -> str:
    """Anomalies in words: the first replica that has some, and its first parameter.

    Args:
        order: of the parameters' names.

    >>> described({1: {"fc.weight": "NaN", "fc.bias": "NaN"}}, ["embedding", "fc.weight", "fc.bias"])
    'the gradient of fc.weight on replica 1 is NaN (2 of its gradients are not finite, to fc.bias)'
    """
    rank = min(found)
    first, *more = (name for name in order if name in found[rank])
    rest = f" ({len(more) + 1} of its gradients are not finite, to {more[-1]})" if more else ""
    return f"the gradient of {first} on replica {rank} is {found[rank][first]}{rest}"
