"""Names of initialisers by the shape and the deviation of what they draw, as torch and flax call them."""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jaxddp.parity.compare.initialisation import (
    CONSTANT,
    MOST_ERRORS,
    ORTHOGONAL,
    Moments,
    is_one_sample,
    varies,
)
from jaxddp.parity.initial_draws import DrawnTensor

# Largest absolute value of numbers of a kind over their deviation; normal ones are cut off at two deviations, or not.
ENDS = {"uniform": math.sqrt(3), "truncated": 2.2736, "normal": math.inf}
CUT = 0.87962566  # deviation of standard normal numbers that are cut off at 2
MARGIN = 1.001  # of these ends, for rounding to bfloat16
# So many numbers show the kind: if it has a wider range, one of them is outside of the narrower range with a
# probability of 99 %. The deviation of fewer numbers is too uncertain.
FEW = {"uniform": 64, "truncated": 100, "normal": 100}
CLOSE = 4.0  # standard errors between a deviation and that of an initialiser


class Known(NamedTuple):
    """A known initialiser.

    Attributes:
        kind: "uniform", "normal" or "truncated".
        gain, mode: its variance is gain over the inputs, the outputs (`KERNEL`) or their mean ("fan_in", "fan_avg").
        torch, flax: its names there; "": none.
    """

    kind: str
    gain: float
    mode: str
    torch: str
    flax: str


BIAS = "uniform within 1/sqrt(fan_in)"  # of torch's layers
KERNEL = "fan_out"  # only of convolutions; of an embedding, it is the number of its rows
# Earlier ones first where a deviation fits several.
KNOWN = (
    Known("uniform", 1 / 3, "fan_in", "kaiming_uniform(a=sqrt(5))", 'variance_scaling(1/3, "fan_in", "uniform")'),
    Known("uniform", 1, "fan_avg", "xavier_uniform", "glorot_uniform()"),
    Known("uniform", 2, "fan_in", "kaiming_uniform", "he_uniform()"),
    Known("uniform", 1, "fan_in", "kaiming_uniform(a=1)", "lecun_uniform()"),
    Known("truncated", 1, "fan_in", "", "lecun_normal()"),
    Known("truncated", 2, "fan_in", "", "he_normal()"),
    Known("truncated", 1, "fan_avg", "", "glorot_normal()"),
    Known("normal", 2, "fan_in", "kaiming_normal", 'variance_scaling(2, "fan_in", "normal")'),
    Known("normal", 1, "fan_avg", "xavier_normal", 'variance_scaling(1, "fan_avg", "normal")'),
    Known("normal", 2, KERNEL, "kaiming_normal(mode='fan_out')", 'variance_scaling(2, "fan_out", "normal")'),
    Known("normal", 1, "fan_in", "", 'variance_scaling(1, "fan_in", "normal")'),
)


class Described(NamedTuple):
    """How a side draws a tensor.

    Attributes:
        family: name of the initialiser, without what depends on the size of a layer.
        says: its name as the side calls it, or the kind of its numbers, with their deviation.
        flax: the initialiser of flax that draws the same; "": unknown.
        is_shapeless: whether `flax` draws the same for arrays of every shape.
    """

    family: str
    says: str
    flax: str = ""
    is_shapeless: bool = False


def described(side: str, name: str, tensors: Mapping[str, DrawnTensor]) -> Described:
    """Describe how a side draws a tensor.

    Args:
        side: "torch" or "jax".
        name: name of the tensor.
        tensors: draws of all tensors of the side.

    >>> rng = np.random.default_rng(0)
    >>> linear = {"weight": DrawnTensor((10, 4), rng.uniform(-0.5, 0.5, (8, 40)), np.ones(8)),
    ...           "bias": DrawnTensor((10,), np.zeros((8, 10)), np.full(8, np.nan))}
    >>> described("torch", "weight", linear).says, described("jax", "bias", linear).says
    ('kaiming_uniform(a=sqrt(5)), deviation 0.296', 'zeros')
    """
    tensor = tensors[name]
    if not varies(tensor) and not is_one_sample(tensor):
        return _constant(tensor.values[0])
    drawn = tensor.values[:, (tensor.values != tensor.values[0]).any(axis=0)] if varies(tensor) else tensor.values[:1]
    moments = Moments.of(drawn[:, None])
    mean, deviation, error = float(moments.mean[0]), math.exp(moments.log[0]), math.sqrt(moments.log_error[0])
    if np.max(tensor.overlap) < ORTHOGONAL:
        return _orthogonal(math.hypot(mean, deviation), tensor.shape)
    largest = float(np.abs(drawn).max())
    known = _known(largest, drawn.size, deviation, error, tensor.shape)
    if known is not None and (called := known.torch if side == "torch" else known.flax):
        called = called.removesuffix("()")
        return Described(called, f"{called}, deviation {deviation:.3g}", known.flax)
    kind = _kind(float(np.abs(drawn - mean).max()) / deviation, drawn.size, error)
    if abs(mean) > MOST_ERRORS * math.sqrt(moments.mean_error[0]):
        return Described(kind, f"{kind or 'drawn'}, mean {mean:.3g}, deviation {deviation:.3g}")
    layer = tensors.get(f"{name.removesuffix('bias')}weight") if name.endswith("bias") else None
    if layer is not None and _is_torch_bias(largest, deviation, error, layer.shape):
        return Described(BIAS, f"{BIAS}, deviation {deviation:.3g}")
    return _by_numbers(kind, deviation, error)


def same_fans(shape: tuple[int, ...], own: tuple[int, ...]) -> bool:
    """Return whether flax's initialisers count as many inputs and outputs of jax's own array as torch of its tensor.

    >>> same_fans((10, 20), (20, 10)), same_fans((10, 20), (10, 20)), same_fans((8, 4, 3, 3), (3, 3, 4, 8))
    (True, False, True)
    """
    return len(shape) == len(own) > 1 and shape[:2] == (own[-1], own[-2])


def fitting_initialiser(described: Described, torch: DrawnTensor, jax: DrawnTensor) -> str:
    """Return the initialiser of flax that draws jax's own array as torch draws its tensor; "": there is none."""
    return described.flax if described.is_shapeless or same_fans(torch.shape, jax.own) else ""


def _is_torch_bias(largest: float, deviation: float, error: float, layer: tuple[int, ...]) -> bool:
    """Return whether numbers may be those of the bias of torch's layer whose weight has this shape."""
    bound = 1 / math.sqrt(math.prod(layer[1:]))
    fits = abs(math.log(deviation * ENDS["uniform"] / bound)) < CLOSE * error
    return len(layer) > 1 and fits and largest <= bound * MARGIN


def _constant(values: np.ndarray) -> Described:
    value = float(values[0])
    if (values != value).any():
        return Described("a table of two values", "a table of two values")
    name = {0.0: "zeros", 1.0: "ones"}.get(value, f"constant({value:.4g})")
    return Described(name, name, name, True)


def _orthogonal(root_mean_square: float, shape: tuple[int, ...]) -> Described:
    gain = root_mean_square * math.sqrt(max(shape[0], math.prod(shape[1:])))
    name = "orthogonal()" if abs(gain - 1) < CONSTANT else f"orthogonal({gain:.3g})"
    return Described("orthogonal", name.removesuffix("()"), name)


def _kind(largest: float, size: int, error: float) -> str:
    """Return the kind of numbers by the largest, in their deviation; "" if they are too few to show it."""
    margin = MARGIN * math.exp(CLOSE * error)  # of a deviation that is measured
    kind = next(kind for kind, end in ENDS.items() if largest <= end * margin)
    return kind if size >= FEW[kind] else ""


def _known(largest: float, size: int, deviation: float, error: float, shape: tuple[int, ...]) -> Known | None:
    """Return the known initialiser of a matrix or a kernel, by its fans as torch counts them, if it is certain."""
    fitting = [*_fitting(largest, size, deviation, error, shape)]
    of_kind = {expected for known, expected in fitting if known.kind == fitting[0][0].kind}
    return fitting[0][0] if len(of_kind) == 1 else None


def _fitting(
    largest: float, size: int, deviation: float, error: float, shape: tuple[int, ...]
) -> Iterator[tuple[Known, float]]:
    """Yield known initialisers that numbers may come from, with their deviations."""
    if len(shape) < 2:
        return
    inputs, outputs = math.prod(shape[1:]), math.prod(shape) // shape[1]
    of_kernel = outputs if len(shape) > 2 else math.nan
    of_mode = {"fan_in": inputs, KERNEL: of_kernel, "fan_avg": (inputs + outputs) / 2}
    for known in KNOWN:
        expected = math.sqrt(known.gain / of_mode[known.mode])
        begin = ENDS["truncated"] if known.kind == "normal" else 0.0
        fits = abs(math.log(deviation / expected)) < CLOSE * error and size >= FEW[known.kind]
        if fits and begin * expected < largest <= ENDS[known.kind] * expected * MARGIN:
            yield known, expected


def _by_numbers(kind: str, deviation: float, error: float) -> Described:
    if not kind:
        return Described("drawn", f"drawn, deviation {deviation:.3g}")
    if kind == "uniform":
        return Described(kind, f"uniform within {_rounded(deviation * ENDS['uniform'], error)}")
    scale = _rounded(deviation / CUT if kind == "truncated" else deviation, error)
    name = f"{'truncated_normal' if kind == 'truncated' else 'normal'}({scale})"
    return Described(kind, name, name, True)


def _rounded(value: float, error: float) -> str:
    """Return a number with as few digits as lie within the error of what was measured."""
    digits = next((n for n in range(1, 4) if abs(math.log(float(f"{value:.{n}g}") / value)) < CLOSE * error), 3)
    return f"{float(f'{value:.{digits}g}'):g}"
