"""Metrics of gradients, and others that are not sums over elements, among the metrics of a step, without a framework:

grad_norm/NAME      norm of a parameter's mean gradient
grad_log2/NAME/K    number of its elements with 2^K <= |g| < 2^(K+1); the first K also counts all smaller
                    elements and zeros, the last K all larger ones
grad_norm, lr       norm of the whole mean gradient before clipping, and learning rate; lr/0, lr/1, ... of groups
anomaly/RANK/CHUNK  local gradients of a replica that are not finite: one digit for each of eight parameters,
                    in the order of their names
anomaly_examples    number of examples whose own loss is not finite
anomaly_example/RANK    1 + the place of a replica's first such example in its batch of the step; 0: none
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxddp.errors import NotFiniteError, TrainingError

NORM, LOG2, ANOMALY = "grad_norm/", "grad_log2/", "anomaly/"
EXAMPLE, EXAMPLES = "anomaly_example", "anomaly_examples"
TOTAL_NORM, RATE = "grad_norm", "lr"
OF_STEP = (TOTAL_NORM, RATE, "scale", "skipped")
LOG2_BINS = range(-32, 9)
CHUNK, BASE = 8, 4  # 16 bits, which float32 represents exactly
KINDS = {1: "infinite", 2: "NaN"}  # meaning of the digits; 0: finite
HINT = "--detect-anomaly names the parameter and the replica, and the example if each has its own loss"


def of_gradients(name: str) -> bool:
    """Return whether a metric is a gradient metric, and thus not a sum over examples.

    >>> of_gradients("grad_norm/fc.weight"), of_gradients("loss")
    (True, False)
    """
    return name.startswith((NORM, LOG2, ANOMALY, EXAMPLE))


def of_step(name: str) -> bool:
    """Return whether a metric is one number for the step, and thus not a sum over examples.

    >>> of_step("lr/1"), of_step("grad_norm"), of_step("grad_norm/fc.weight"), of_step("loss")
    (True, True, False, False)
    """
    return name in OF_STEP or name.startswith(f"{RATE}/")


def by_group(rates: Sequence[Any]) -> dict[str, Any]:
    """Name the learning rates of an optimizer's groups.

    >>> by_group([0.1]), by_group([0.1, 0.2])
    ({'lr': 0.1}, {'lr/0': 0.1, 'lr/1': 0.2})
    """
    return {f"{RATE}/{i}" if len(rates) > 1 else RATE: rate for i, rate in enumerate(rates)}


def renamed(sums: Mapping[str, float], shown: Callable[[str], str]) -> dict[str, float]:
    """Rename the parameters in the names of metrics.

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
    """Return the gradient norms of a step, "grad_norm/NAME" -> norm."""
    return {name: float(value) for name, value in sums.items() if name.startswith(NORM)}


def histograms(sums: Mapping[str, float]) -> dict[str, list[int]]:
    """Return the histograms of a step, or of a sum over steps: NAME -> one count for each of `LOG2_BINS`.

    >>> histograms({"loss": 1.0} | {f"grad_log2/fc.weight/{k}": float(k == -3) for k in LOG2_BINS})["fc.weight"][29]
    1
    """
    counts: dict[str, list[int]] = {}
    for column, count in sums.items():
        if column.startswith(LOG2):
            name, _, k = column.removeprefix(LOG2).rpartition("/")
            counts.setdefault(name, [0] * len(LOG2_BINS))[LOG2_BINS.index(int(k))] = round(count)
    return counts


def anomalies(sums: Mapping[str, float], names: Iterable[str]) -> dict[int, dict[str, str]]:
    """Return the local gradients of a step that are not finite: replica -> parameter -> "NaN" or "infinite".

    Args:
        sums: metrics of the step.
        names: names of the trained parameters.

    >>> anomalies({"loss": 1.0, "anomaly/0/0": 0.0, "anomaly/1/0": 2 * 4.0}, ["fc.weight", "fc.bias"])
    {1: {'fc.weight': 'NaN'}}
    """
    names = sorted(names)
    by_rank: dict[int, dict[str, str]] = {}
    for column, value in sums.items():
        if column.startswith(ANOMALY) and value:
            rank, chunk = map(int, column.removeprefix(ANOMALY).split("/"))
            for place, name in enumerate(names[chunk * CHUNK : (chunk + 1) * CHUNK]):
                if digit := round(value) // BASE**place % BASE:
                    by_rank.setdefault(rank, {})[name] = KINDS[digit]
    return by_rank


def example_anomaly(sums: Mapping[str, float]) -> tuple[int, ...]:
    """Return the place in a step's batch of the first example whose loss is not finite, and their number; or ().

    >>> example_anomaly({"loss": math.nan, "anomaly_examples": 2.0, "anomaly_example/0": 4.0, "anomaly_example/1": 3.0})
    (5, 2)
    """
    firsts = {int(name.rpartition("/")[2]): round(x) for name, x in sums.items() if name.startswith(f"{EXAMPLE}/")}
    places = [(first - 1) * len(firsts) + rank for rank, first in firsts.items() if first]
    return (min(places), round(sums[EXAMPLES])) if places else ()


def check_finite(
    sums: Mapping[str, float], step: int, anomaly: str | None, batch: Callable[..., str] | None = None
) -> None:
    """Raise `NotFiniteError` if the loss or gradients of a step are not finite, unless it was skipped.

    A loss scale of 0 raises `TrainingError` too.

    Args:
        sums: metrics of the step.
        step: number of the step, for the message.
        anomaly: description of the gradients that are not finite; "" if all are finite, None if unknown.
        batch: describes the batch of a step, for the message; its other arguments are those of `example_anomaly`.

    >>> check_finite({"loss": math.inf}, 3, "the gradient of fc.bias on replica 1 is NaN")
    Traceback (most recent call last):
    ...
    jaxddp.errors.NotFiniteError: loss is inf at step 3; the gradient of fc.bias on replica 1 is NaN
    """
    loss = sums["loss"]
    if sums.get("scale") == 0:
        raise TrainingError(f"every step overflows: the loss scale is 0 at step {step}")
    if sums.get("skipped"):
        return
    if not math.isfinite(loss):
        detail = HINT if anomaly is None else anomaly or "every gradient is finite"
        message = f"loss is {loss} at step {step}; {detail}"
    elif anomaly:
        message = f"{anomaly} at step {step}, with a loss of {loss:g}"
    else:
        return
    raise NotFiniteError(message if batch is None else f"{message}; {batch(step, *example_anomaly(sums))}")


def explained(sums: Mapping[str, float], order: Sequence[str], shown: Callable[[str], str] = str) -> str:
    """Describe the gradients of a step that are not finite; "" if all are finite.

    Args:
        sums: metrics of the step.
        order: names of the trained parameters, from the model's input to its output.
        shown: name -> name in the description.
    """
    by_rank = anomalies(sums, order)
    renamed_by_rank = {rank: {shown(name): kind for name, kind in kinds.items()} for rank, kinds in by_rank.items()}
    return described(renamed_by_rank, [shown(name) for name in order]) if by_rank else ""


def described(by_rank: Mapping[int, Mapping[str, str]], order: Sequence[str]) -> str:
    """Describe the first anomaly: lowest replica, first parameter.

    Args:
        by_rank: replica -> parameter -> "NaN" or "infinite", as from `anomalies`.
        order: names of the trained parameters, from the model's input to its output.

    >>> described({1: {"fc.weight": "NaN", "fc.bias": "NaN"}}, ["embedding", "fc.weight", "fc.bias"])
    'the gradient of fc.weight on replica 1 is NaN (2 gradients of this replica are not finite, up to fc.bias)'
    """
    rank = min(by_rank)
    first, *more = (name for name in order if name in by_rank[rank])
    rest = f" ({len(more) + 1} gradients of this replica are not finite, up to {more[-1]})" if more else ""
    return f"the gradient of {first} on replica {rank} is {by_rank[rank][first]}{rest}"
