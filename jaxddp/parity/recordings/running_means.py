"""Running means of BatchNorm that differ because biases before them do, which no loss sees.

A bias in front of BatchNorm has a gradient of only rounding, so each side moves it in its own way, and the running
mean moves with it. With momentum m, each micro-batch changes the difference e of the two sides' means by the
difference d of their biases:

    e <- (1 - m) e + m d
"""

from collections.abc import Iterator, Mapping

import numpy as np

from jaxddp.parity.compare.residuals import MOVED
from jaxddp.parity.recordings.outside import OutsideChanges, length
from jaxddp.parity.records import Tensors, stage_norm

# Share of a mean's shift that biases leave unexplained at a typical step, if they cause it; measured: 1e-5 in float32.
LEFT = 0.1
# Norm of the shift of a mean over that of all biases, if further layers lie between them; measured: up to 2.
PASSED_ON = 10.0

Steps = dict[int, np.ndarray]


def running_means(outside: OutsideChanges) -> dict[str, dict[int, np.ndarray | None]]:
    """Compute what biases leave unexplained of the differences of running means.

    Args:
        outside: both recordings, with the parameters from which JAX's steps start.

    Returns:
        tensor -> step -> the difference of the mean that remains, for the steps that follow another one; None: layers
        between biases and mean may have made all of it.
    """
    alignment, torch_run, noise = outside.alignment, outside.torch_run, outside.noise
    steps = {number: torch_run.steps[number] for number in outside.numbers}
    params = {number: alignment.of_torch(step["params"]) for number, step in steps.items()}
    shifts = {n: {name: x - params[n][name] for name, x in outside.params(n).items() if name in noise} for n in steps}
    remaining: dict[str, dict[int, np.ndarray | None]] = {}
    for name in torch_run.of_kind("buffer") if noise else []:
        _, sizes = torch_run.header["modules"].get(name.removesuffix(f".{MOVED}"), ("", {}))
        if not name.endswith(MOVED) or "momentum" not in sizes:
            continue
        share = 1 - (1 - sizes["momentum"]) ** steps[outside.numbers[0]].notes["micro_batches"]
        apart: Steps = {}
        for number, step in steps.items():
            sides = [alignment.of_jax(outside.jax_run.steps[number]["buffers"]), step["buffers"]]
            if all(name in side for side in sides):
                apart[number] = np.subtract(*(side[name].astype(float) for side in sides))
        added = {n: (x - (1 - share) * apart[n - 1]) / share for n, x in apart.items() if n - 1 in apart}
        left = _explained(added, [*_candidates(shifts, params, added)])
        is_explained = np.mean([length(left[n]) <= LEFT * length(x) for n, x in added.items()] or [False]) >= 0.5
        remaining[name] = {
            n: None if not is_explained and length(apart[n]) <= PASSED_ON * stage_norm(shifts[n]) else share * x
            for n, x in left.items()
        }
    return remaining


def _candidates(shifts: Mapping[int, Tensors], params: Mapping[int, Tensors], added: Steps) -> Iterator[Steps]:
    """Yield what biases may add to a mean: their own shifts, and these after a linear layer."""
    if not added:
        return
    first = next(iter(added))
    size = added[first].shape
    for bias, shift in shifts[first].items():
        if shift.shape == size:
            yield {number: shifts[number][bias] for number in added}
        for weight, matrix in params[first].items():
            if matrix.shape == (*size, *shift.shape) and matrix.ndim == 2:
                yield {number: params[number][weight] @ shifts[number][bias] for number in added}


def _explained(added: Steps, candidates: list[Steps]) -> Steps:
    """Subtract the candidates that make what was added smaller at a typical step."""
    while candidates:
        left = [{number: x - candidate[number] for number, x in added.items()} for candidate in candidates]
        sizes = [_typical(rest) for rest in left]
        nearest = int(np.argmin(sizes))
        if sizes[nearest] >= _typical(added):
            break
        added = left[nearest]
        del candidates[nearest]
    return added


def _typical(steps: Steps) -> float:
    return float(np.median([length(x) for x in steps.values()]))
