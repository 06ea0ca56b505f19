"""Record the random numbers that a torch loss or step draws, or take them from the batch. Imports no jax."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from jaxddp.parity.port.draws import (
    CERTAIN,
    CONSTANTS,
    SERVED,
    Draw,
    DrawnPort,
    Served,
    calling,
    enclosing_layer,
)

# Operators that dropout, attention, torch.distributions and all other random functions call -> kind of their numbers.
KINDS = {
    **dict.fromkeys(("normal", "normal_", "randn", "randn_like"), "normal"),
    **dict.fromkeys(("uniform_", "rand", "rand_like"), "uniform"),
    **dict.fromkeys(("bernoulli", "bernoulli_", "native_dropout"), "bernoulli"),
}
RECOMPUTED = "torch.utils.checkpoint computes it twice, outside of the loss; turn the checkpoint off in the port"
OTHER = f"only {', '.join(SERVED)} numbers can be the same on both sides; make them an entry of the batch"


class NotedDraws(TorchDispatchMode):
    """Context manager that notes the draws of a loss.

    Args:
        model: the module whose layers are named.

    Attributes:
        draws: the draws so far.

    >>> with NotedDraws(nn.Dropout(0.25)) as noted:
    ...     _ = nn.functional.dropout(torch.ones(2, 3), 0.25), torch.randperm(3)
    >>> [(draw.kind, draw.shape, draw.rate) for draw in noted.draws]
    [('bernoulli', (2, 3), 0.75), ('randperm', (3,), None)]
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.draws: list[Draw] = []
        self._names = {id(module): name for name, module in model.named_modules()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and note its draw."""
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded not in func.tags or _is_constant(name, args):
            return func(*args, **kwargs or {})
        before = torch.get_rng_state()
        result = func(*args, **kwargs or {})
        if name in KINDS or not torch.equal(before, torch.get_rng_state()):  # attention may or may not draw
            self.draws.append(self._draw(name, args, result))
        return result

    def _draw(self, name: str, args: tuple[Any, ...], result: Any) -> Draw:
        shape = tuple((result[0] if isinstance(result, tuple) else result).shape)
        where = enclosing_layer(lambda layer: self._names.get(id(layer)))
        if any(frame.f_globals.get("__name__") == "torch.utils.checkpoint" for frame in calling()):
            return Draw(KINDS.get(name, name), shape, where, refused=RECOMPUTED)
        if name not in KINDS:
            return Draw(name.strip("_"), shape, where, refused=OTHER)
        rate = _probability(name, args) if KINDS[name] == "bernoulli" else None
        return Draw(KINDS[name], shape, where, None if isinstance(rate, Tensor) else rate)


class ConstantDraws:
    """Numbers for `ServedDraws` of a trial: constants."""

    def take(self, kind: str, shape: Sequence[int]) -> Tensor:
        """Return the constant of a kind."""
        return torch.full(tuple(shape), CONSTANTS[kind])


class ServedDraws(TorchDispatchMode):
    """Context manager in which draws return given numbers.

    Args:
        served: the numbers.

    >>> numbers = {"jaxddp draw 0": torch.tensor([0.2, 0.8])}
    >>> with ServedDraws(Served(numbers, [Draw("bernoulli", (2,))], "torch")):
    ...     nn.functional.dropout(torch.ones(2), 0.5)
    tensor([2., 0.])
    """

    _active: ClassVar[list[Served | ConstantDraws]] = []

    def __init__(self, served: Served | ConstantDraws) -> None:
        super().__init__()
        self._served = served

    def __enter__(self) -> Self:
        self._active.append(self._served)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._active.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, with given numbers in place of those that it draws."""
        name = func.overloadpacket.__name__
        if name not in KINDS or _is_constant(name, args):
            return func(*args, **kwargs or {})
        given = tuple(x.clone() if isinstance(x, Tensor) and i else x for i, x in enumerate(args))
        result = func(*args, **kwargs or {})
        numbers = result[1] if isinstance(result, tuple) else result
        values = self._served.take(KINDS[name], numbers.shape)
        numbers.copy_(FORMULAS.get(name, lambda values, args: values)(values.to(numbers.device), given))
        if isinstance(result, tuple):  # native_dropout: (input * mask / (1 - p), mask)
            result[0].copy_(args[0] * numbers / (1 - args[1]))
        return result


def numbers_of_draw(kind: str, shape: Sequence[int]) -> Tensor | None:
    """Return the numbers that the next draw would get in `ServedDraws`, as that draw; None: torch draws them."""
    active = ServedDraws._active
    return active[-1].take(kind, shape) if active else None


def serving(port: DrawnPort, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the port's torch loss or `torch_step` such that it takes its random numbers from the batch."""

    def served_function(*arguments: Any) -> Any:
        *others, batch = arguments
        served = Served(batch, [pair.torch for pair in port.draws], "torch")
        with ServedDraws(served):
            returned = function(*others, served.rest)
        served.check()
        return returned

    return served_function


def _probability(name: str, args: tuple[Any, ...]) -> Any:
    """Return the probability of a 1, a number or a tensor."""
    if name == "native_dropout":
        return 1 - args[1]
    if len(args) > 1:
        return args[1]
    return 0.5 if name == "bernoulli_" else args[0]


def _is_constant(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether a draw has one possible result, as a mask of dropout with rate 0."""
    probability = _probability(name, args) if KINDS.get(name) == "bernoulli" else None
    return isinstance(probability, int | float) and probability in CERTAIN


def _bernoulli(name: str) -> Callable[[Tensor, tuple[Any, ...]], Tensor]:
    return lambda values, args: values < _probability(name, args)


def _uniform(values: Tensor, args: tuple[Any, ...]) -> Tensor:
    low, high = _two(args[1:], (0.0, 1.0))
    return low + values * (high - low)


def _normal(values: Tensor, args: tuple[Any, ...]) -> Tensor:
    mean, deviation = _two(args, (0.0, 1.0))
    return mean + deviation * values


def _two(given: tuple[Any, ...], defaults: tuple[float, float]) -> tuple[Any, Any]:
    """Return the first two arguments, with defaults for those not given."""
    first, second = given[:2] + defaults[len(given) :]
    return first, second


# Operator -> its result as a function of (numbers, arguments); the others return the numbers.
FORMULAS = {
    "uniform_": _uniform,
    "normal_": lambda values, args: _normal(values, args[1:]),
    "normal": _normal,
    **{name: _bernoulli(name) for name in ("bernoulli", "bernoulli_", "native_dropout")},
}
