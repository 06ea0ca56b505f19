"""Trace the step of a stock torch optimizer: its calls, with the terms of their numbers, to be run again with others.

    NAdam   add_(step, 1)  mul_(mu_product, betas[0] * (1 - 0.5 * 0.96 ** (step * momentum_decay)))  lerp_(exp_avg, ...)

A trace holds as long as the branches do that torch took: each comparison of a named number is a guard, and where one
has another result, the step is traced again.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from jaxddp.parity.diagnosis.optimizer.named import Guard, NamedFloat

Names = dict[str, Any]
State = dict[str, Any]
PARAM, GRAD = 0, 1  # numbers of these tensors in every trace
# Other options choose among implementations that compute the same.
IMPLEMENTATION = {"foreach": False, "capturable": False, "differentiable": False, "fused": None}


@dataclass(frozen=True)
class Ref:
    """A tensor of a trace."""

    number: int


@dataclass(frozen=True)
class Number:
    """A number of a trace, as a term of names."""

    term: Any


@dataclass(frozen=True)
class Op:
    """A call of a torch function.

    Attributes:
        function, args, kwargs: the call, with `Ref` and `Number` in its arguments.
        result: number of the tensor that it returns.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: int

    @property
    def name(self) -> str:
        """Name of the function."""
        return str(self.function.__name__)

    @property
    def numbers(self) -> Iterator[Number]:
        """Numbers among the arguments."""
        return (x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Number))

    def uses(self, number: int) -> bool:
        """Return whether a tensor is among the arguments."""
        return Ref(number) in (*self.args, *self.kwargs.values())


@dataclass(frozen=True)
class Read:
    """A number that is read from a tensor, under a name."""

    tensor: int
    name: str


@dataclass(frozen=True)
class Trace:
    """Calls of one optimizer step.

    Attributes:
        ops: calls, reads and guards in order.
        inputs: state before the step -> number of the tensor.
        outputs: state after the step -> number of the tensor, or the value if it is none.
    """

    ops: tuple[Op | Read | Guard, ...]
    inputs: Mapping[str, int]
    outputs: Mapping[str, Any]

    @property
    def calls(self) -> Iterator[tuple[int, Op]]:
        """Calls with their places among `ops`."""
        return ((place, op) for place, op in enumerate(self.ops) if isinstance(op, Op))


TraceEdit = Callable[[Trace], Trace]


class _Recorder(TorchFunctionMode):
    """Records calls while they are made."""

    def __init__(self, tensors: Iterable[Tensor]):
        super().__init__()
        self.ops: list[Op | Read | Guard] = []
        self.kept: list[Any] = []  # no other object gets the id of one of these
        self.numbers: dict[int, int] = {}
        self.state: Mapping[str, Any] = {}
        self.reads = 0
        for tensor in tensors:
            self.number(tensor)

    def number(self, tensor: Tensor) -> int:
        if id(tensor) not in self.numbers:
            self.numbers[id(tensor)] = len(self.numbers)
            self.kept.append(tensor)
        return self.numbers[id(tensor)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.__name__ == "item" and isinstance(args[0], Tensor):
            return self._read(args[0], result)
        if isinstance(result, Tensor) and not (func.__name__ == "__get__" and id(result) in self.numbers):
            taken = tuple(map(self._taken, args)), {name: self._taken(x) for name, x in kwargs.items()}
            self.ops.append(Op(func, *taken, self.number(result)))
        elif func.__name__ == "__setitem__":
            self.ops.append(Op(func, tuple(map(self._taken, args)), {}, self.number(args[0])))
        return result

    def _read(self, tensor: Tensor, value: Any) -> Any:
        number, self.reads = self.number(tensor), self.reads + 1
        name = f"{next((key for key, x in self.state.items() if x is tensor), 'number')}#{self.reads}"
        self.ops.append(Read(number, name))
        return NamedFloat(value, name, self.ops)

    def _taken(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return Ref(self.number(argument))
        if isinstance(argument, list | tuple):
            return type(argument)(map(self._taken, argument))
        return Number(argument.term) if isinstance(argument, NamedFloat) else argument


def trace_step(
    kind: str, options: Names, flags: Mapping[str, Any], params: Tensor, gradient: Tensor, state: State
) -> Trace:
    """Trace one step of `torch.optim.<kind>` on a tensor.

    Args:
        kind: name of the class.
        options: numbers by name: "lr", "betas[0]", ...
        flags: its other options.
        params, gradient: tensors whose values decide on the branches that torch takes.
        state: state of the tensor before the step; {}: there is none yet.

    Raises:
        ValueError: torch refuses an option.
    """
    param = nn.Parameter(params.clone())
    param.grad = gradient.clone()
    kept = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
    given = {key: value for key, value in kept.items() if isinstance(value, Tensor)}
    recorder = _Recorder((param, param.grad, *given.values()))
    made = getattr(torch.optim, kind)
    plain = {name: x for name, x in IMPLEMENTATION.items() if name in inspect.signature(made).parameters}
    numbers = _nested({name: NamedFloat(x, name, recorder.ops) for name, x in options.items()})
    optimizer = made([param], **plain)
    with recorder:
        if optimizer.state:  # as Adagrad's, which starts from an option
            optimizer = made([param], **numbers, **flags, **plain)
            recorder.ops[:] = [op for op in recorder.ops if isinstance(op, Op)]  # without the checks of the options
        optimizer.param_groups[0].update(numbers | dict(flags))  # torch would refuse some, as Nesterov without momentum
        if state:
            optimizer.state[param] = kept
        recorder.state = optimizer.state[param]
        optimizer.step()
    after = optimizer.state[param]
    outputs = {key: Ref(recorder.number(x)) if isinstance(x, Tensor) else x for key, x in after.items()}
    inputs = {key: recorder.number(x) for key, x in given.items()}
    return Trace(tuple(_needed(recorder.ops, outputs.values())), inputs, outputs)


def _needed(ops: Sequence[Op | Read | Guard], outputs: Iterable[Any]) -> list[Op | Read | Guard]:
    """Return the operations on which the parameters, the outputs or a branch depend, and those that work in place.

    >>> made, unused = (Op(torch.ones, (2,), {}, number) for number in (2, 3))
    >>> _needed([made, unused], [Ref(2)]) == [made]
    True
    """
    needed = {PARAM, *(x.number for x in outputs if isinstance(x, Ref))}
    kept = []
    for op in reversed(ops):
        if isinstance(op, Op) and op.result not in needed and not op.name.endswith("_"):
            continue
        kept.append(op)
        if isinstance(op, Read):
            needed.add(op.tensor)
        elif isinstance(op, Op):
            needed.update(_tensors([*op.args, *op.kwargs.values()]))
    return kept[::-1]


def _tensors(arguments: Iterable[Any]) -> Iterator[int]:
    """Yield the numbers of the tensors among arguments and in lists of them."""
    for x in arguments:
        if isinstance(x, Ref):
            yield x.number
        elif isinstance(x, list | tuple):
            yield from _tensors(x)


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with those of one tuple together.

    >>> _nested({"lr": 0.1, "betas[0]": 0.9, "betas[1]": 0.99})
    {'lr': 0.1, 'betas': (0.9, 0.99)}
    """
    nested: dict[str, Any] = {}
    for name, value in options.items():
        stem, bracket, _ = name.partition("[")
        nested[stem] = (*nested.get(stem, ()), value) if bracket else value
    return nested
