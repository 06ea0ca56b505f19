"""Rates of a port's torch optimizer with another number in its scheduler. Imports no jax."""

import ast
import contextlib
import inspect
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any
from unittest import mock

from torch.optim.lr_scheduler import LRScheduler

from jaxddp.parity.deviation import Value, as_code
from jaxddp.parity.operations import is_of_user
from jaxddp.parity.processes import Tell
from jaxddp.parity.rate_curves import ALLOWED, TorchRates
from jaxddp.parity.torch_side.made_lines import noted
from jaxddp.parity.torch_side.rates import ReadTorchRates, optimizer_of
from jaxddp.parity.torch_side.side import Source, TorchSide, make_side
from jaxddp.parity.user_code.file_text import number_of
from torch_ref.distributed import World

MOST = 400  # trials; measured: 50 in one port, the encoder of tests/faults/outside
Number = int | float


@dataclass(frozen=True)
class Place:
    """Place of a number of a scheduler.

    Attributes:
        kind, made: the scheduler's class, and how many of it were made before.
        argument: name of its argument; of several functions, with the function's position ("lr_lambdas.0").
        name: of an argument that is a function: what has the number, a global's name or a constant's position.
    """

    kind: type
    made: int
    argument: str
    name: str = ""


@dataclass(frozen=True)
class OtherSchedules:
    """A job that computes the rates of a port's torch optimizer with other numbers in its schedulers.

    Attributes:
        source: model or port.
        steps: steps of the check's run.
        step, rate: a step of the run, from 0, and the rate that a schedule must have there.
        total_steps: see `ReadTorchRates`.
        world_size: always 1.
    """

    source: Source
    steps: int
    step: int
    rate: float
    total_steps: int | None = None
    world_size: int = 1

    def run(self, world: World, tell: Tell) -> list[tuple[Value, TorchRates]]:
        """Return the numbers with which a schedule has the rate, and its rates with them; the stated ones first."""
        tell("the scheduler with other numbers")
        side, found = make_side(self.source, self.steps, "float64"), list[tuple[Value, TorchRates]]()
        read = ReadTorchRates(self.source, self.steps, self.total_steps)
        for place, value, other in _trials(_numbers(side, world)):
            with contextlib.suppress(Exception):  # a scheduler may refuse a number
                with replaced(place, other):
                    fits = self._has_rate(side, world)
                with replaced(place, other):
                    rates = read.run(world, tell) if fits else None
                if rates is not None and not rates.why_not:
                    key = place.name if place.name.isidentifier() else place.argument
                    found.append((Value(as_code(other), as_code(value), place.kind.__name__, key), rates))
        return found

    def _has_rate(self, side: TorchSide, world: World) -> bool:
        """Return whether a group has the rate at the step."""
        optimizer, schedulers = optimizer_of(side, world)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no optimizer has taken a step
            for _ in range(self.step):
                for scheduler in schedulers:
                    scheduler.step()
        return any(abs(float(group["lr"]) - self.rate) <= ALLOWED * abs(self.rate) for group in optimizer.param_groups)


def _numbers(side: TorchSide, world: World) -> dict[Place, Number]:
    """Return the numbers of a side's schedulers."""
    with noted(LRScheduler) as made:
        optimizer_of(side, world)
    numbers: dict[Place, Number] = {}

    def note(place: Place, x: Number) -> Number:
        numbers[place] = x
        return x

    with contextlib.ExitStack() as stack:
        for kind in {type(scheduler) for scheduler, _ in made}:
            stack.enter_context(_observing(kind, note))
        optimizer_of(side, world)
    return numbers


def _trials(numbers: Mapping[Place, Number]) -> Iterator[tuple[Place, Number, Number]]:
    """Yield other numbers for each place: those that the user's files state, then near ones, at most `MOST`."""
    stated = sorted({*_stated()})
    near = {place: (x - 1, x + 1, 2 * x, x // 2 if isinstance(x, int) else x / 2) for place, x in numbers.items()}
    pairs = [(place, other) for place in numbers for other in stated]
    pairs += [(place, other) for place, others in near.items() for other in others if other not in stated]
    fitting = ((place, other) for place, other in pairs if other != numbers[place])
    of_kind = ((place, other) for place, other in fitting if isinstance(numbers[place], float) or other == int(other))
    for place, other in itertools.islice(of_kind, MOST):
        yield place, numbers[place], type(numbers[place])(other)


def _stated() -> Iterator[Number]:
    """Yield the numbers in the user's files that are loaded."""
    files = {getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]}
    for file in sorted(file for file in files if file.endswith(".py") and is_of_user(file)):
        with contextlib.suppress(OSError, SyntaxError, UnicodeDecodeError):
            for node in ast.walk(ast.parse(Path(file).read_text())):
                value = number_of(node, {}) if isinstance(node, ast.expr) else None
                if value is not None:
                    yield value


@contextlib.contextmanager
def replaced(place: Place, value: Number) -> Iterator[None]:
    """Within the `with` statement, let a scheduler be made with another number."""
    with _observing(place.kind, lambda at, x: value if at == place else x):
        yield


@contextlib.contextmanager
def _observing(kind: type, give: Callable[[Place, Number], Number]) -> Iterator[None]:
    """Give each scheduler of a class that is made within the `with` statement other numbers."""
    make: Any = kind.__init__  # type: ignore[misc]
    signature, count = inspect.signature(make), 0

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal count
        given = signature.bind(self, *args, **kwargs)
        for name, x in [*given.arguments.items()]:
            given.arguments[name] = _with(Place(kind, count, name), x, give)
        count += 1
        make(*given.args, **given.kwargs)

    with mock.patch.object(kind, "__init__", made):
        yield


def _with(place: Place, x: Any, give: Callable[[Place, Number], Number]) -> Any:
    """Return an argument with other numbers, in lists and functions, too."""
    if isinstance(x, int | float) and not isinstance(x, bool):
        return give(place, x)
    if isinstance(x, list | tuple):
        each = (replace(place, argument=f"{place.argument}.{position}") for position in range(len(x)))
        return type(x)(_with(at, one, give) for at, one in zip(each, x, strict=True))
    return _function(place, x, give) if isinstance(x, FunctionType) else x


def _function(place: Place, function: FunctionType, give: Callable[[Place, Number], Number]) -> FunctionType:
    """Return a function with other numbers for its constants, and for the globals that it reads."""
    code: CodeType = function.__code__
    constants = [
        give(replace(place, name=f"{position}"), x) if isinstance(x, int | float) and not isinstance(x, bool) else x
        for position, x in enumerate(code.co_consts)
    ]
    numbers = {name: function.__globals__.get(name) for name in code.co_names}
    others = {
        name: give(replace(place, name=name), x)
        for name, x in numbers.items()
        if isinstance(x, int | float) and not isinstance(x, bool)
    }
    made = FunctionType(
        code.replace(co_consts=tuple(constants)),
        {**function.__globals__, **others},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
