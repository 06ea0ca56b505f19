"""Calls of torch functions in a loss, and faults that change them.

Modules and functional losses call the same functions (`F.gelu`, `F.layer_norm`, `Tensor.reshape`),
so one mechanism reaches both. A call has a `Site`: the k-th call of a function of that name. A
`Change` is the effect of a fault on one call; a `CallEdit` is a change at one site or at several.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from typing import Any

from torch import Tensor
from torch.overrides import get_testing_overrides

from jaxddp.parity.deviation import Deviation, Statement, Value, as_code, rounded
from jaxddp.parity.diagnosis.search.fit import Item
from jaxddp.parity.operations import Moments, SourceLine

Site = tuple[str, int]
Gather = Callable[[Tensor], Sequence[Tensor]]
Name = str | Statement  # of a tensor
Names = Mapping[int, Name]  # id of a tensor -> what it is

RELATIVE = ("factor", "addend", "auxiliary_loss_scaled")  # faults whose value changes the reference's
OF = " of "  # in a site of an inner call: function of part


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a torch function in a running loss.

    Attributes:
        site: name of the function, and number of its earlier calls; of an inner call of a recurrent layer: name of the
            function, what it computes, and number of the cell.
        function, args, kwargs: the function and its arguments.
        module: name of the innermost module that is being executed; "" for the root, None outside.
        count_more: function that adds a number to the "count" that the loss function returns.
        gather: function from a tensor to the tensors of all replicas at this call, for replicas that run
            side by side.
        earlier: function from a site that a change `needs` to the result of its call.
        result: return value, if the call was recorded.
        into: recorded calls whose first argument is the result.
        line: the user's line that makes the call, if it was recorded; None: unknown.
        callers: the user's lines that call the function of `line`, the innermost first.
        results: moments of the tensors that it returned, if it was recorded.
        within: the call that makes it as an inner call; None: the user's program makes it.
        caller: library's function that the user's line calls, if that makes this call.
        place: instruction of the user's function that makes it, of the line's calls; -1: unknown.
    """

    site: Site
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    module: str | None = None
    count_more: Callable[[float], None] = lambda number: None
    gather: Gather = lambda tensor: (tensor,)
    earlier: Callable[[Site], Any] = lambda site: None
    result: Any = None
    into: list["Call"] = field(default_factory=list)
    line: SourceLine | None = None
    callers: tuple[SourceLine, ...] = ()
    results: tuple[Moments, ...] = ()
    within: Site | None = None
    caller: str = ""
    place: int = -1

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.site[0].partition(OF)[0]

    @property
    def words(self) -> str:
        """Name of the function, and what an inner call computes: "tanh of the cell state"."""
        return "transpose" if self.site[0] == "t" else self.site[0]

    def get(self, key: int | str, default: Any = None) -> Any:
        """Return an argument by its place or its parameter's name."""
        position = self._position(key)
        return self.args[position] if position < len(self.args) else self.kwargs.get(str(key), default)

    def put(self, key: int | str, value: Any) -> "Call":
        """Return the call with one argument replaced."""
        position = self._position(key)
        if position < len(self.args):
            return replace(self, args=(*self.args[:position], value, *self.args[position + 1 :]))
        return replace(self, kwargs={**self.kwargs, str(key): value})

    def but(self, **arguments: Any) -> "Call":
        """Return the call with some arguments replaced."""
        return reduce(lambda call, one: call.put(*one), arguments.items(), self)

    def run(self) -> Any:
        """Make the call."""
        return self.function(*self.args, **self.kwargs)

    def _position(self, key: int | str) -> int:
        if isinstance(key, int):
            return key
        names = [*parameters_of(self.function)]
        return names.index(key) if key in names else len(self.args)


Proceed = Callable[[Call], Any]  # makes a call, with the other faults planted in it
Answer = Callable[[Call, Proceed, float], Any]  # returns the result of a call in its place, with an edit's value


@dataclass(frozen=True)
class Change:
    """Effect of a fault on one call.

    Attributes:
        fault: a name of `catalogue.FAULTS`.
        what: what the port does; the value of the edit, if there is one, follows.
        answer: function that replaces the call.
        reference: the reference's value, for a fault that is a wrong value; None: nothing to fit.
        start: initial value of the fit.
        least: the smallest valid value.
        setting: a program has one setting for all calls, so single sites are not tried.
        lockstep: the replicas have to run side by side, because the fault exchanges their tensors.
        stale: the loss is taken at the weights of the step before.
        counts: the fault changes how many elements count.
        group: what the port does at several calls whose `what` differs; None: such calls do not form a group.
        subsets: a program has the fault in any of a few places, so every set of them is tried.
        tier: rank among explanations that do the same: 0 for a fault of the catalogue, more for edits that can
            replace many others.
        also: sites of other calls that the answer changes.
        needs: sites of earlier calls whose results the answer takes.
        entry: name of the entry of the batch that the fault is about; "": it is about none.
        values: the values that differ; the numbers of one that is fitted are filled in.
        detail: what else the fix depends on, see `Deviation`.
    """

    fault: str
    what: Statement
    answer: Answer = lambda call, proceed, value: proceed(call)
    reference: float | None = None
    start: float = 0.0
    least: float = 0.0
    setting: bool = False
    lockstep: bool = False
    stale: bool = False
    counts: bool = False
    group: Statement | None = None
    subsets: bool = False
    tier: int = 0
    also: tuple[Site, ...] = ()
    needs: tuple[Site, ...] = ()
    entry: str = ""
    values: tuple[Value, ...] = ()
    detail: str = ""

    def filled(self, value: float | None) -> tuple[Value, ...]:
        """Return the values with the numbers of a fitted one; None: nothing is fitted."""
        if value is None or self.reference is None:
            return self.values
        numbers = as_code(value), as_code(self.reference)
        return tuple(replace(one, jax=numbers[0], torch=numbers[1]) for one in self.values)


@dataclass(frozen=True)
class CallEdit(Item):
    """A change at one site or several, with its value.

    Attributes:
        change: effect on each of the calls.
        sites: the calls.
        where: the module, or a pattern of modules; "" for everywhere.
        value: the fault's value; None: the change has none.
        given: the value is a number of the port's and not fitted.
        changes: changes of single sites that differ from `change`.
    """

    change: Change
    sites: frozenset[Site]
    where: str = ""
    value: float | None = None
    given: bool = False
    changes: Mapping[Site, Change] = field(default_factory=dict, compare=False)

    @property
    def deviations(self) -> tuple[Deviation, ...]:
        """Fault, value, place, and the reference's value."""
        change, more = self.change, dict[str, Any]()
        if self.value is not None:
            more["value"] = rounded(self.value)
        if self.where:
            more["where"] = self.where
        if change.reference is not None and change.fault not in RELATIVE:
            more["reference"] = rounded(change.reference)
        what = change.what.but(**more)
        return (Deviation(change.fault, what, change.filled(self.value), self.where, change.detail),)

    @property
    def reference(self) -> float | None:
        """Value of the reference; None: there is nothing to fit."""
        return None if self.given else self.change.reference

    @property
    def tier(self) -> int:
        """Rank among explanations that do the same."""
        return self.change.tier - self.given

    @property
    def plausible(self) -> bool:
        """Return whether a programmer has written the value, or may have; a factor of 0 is another fault."""
        is_zero = self.value == 0 and self.change.fault == "number"
        is_factor = any(one.is_factor for one in self.change.values)
        return self.given or (super().plausible and not (is_zero and is_factor))

    @property
    def start(self) -> float:
        """Initial value of the fit."""
        return self.change.start

    def at(self, value: float) -> "CallEdit":
        """Return the fault with another value."""
        return replace(self, value=max(value, self.change.least))

    @property
    def all_changes(self) -> list[Change]:
        """Changes of all sites."""
        return [self.change, *self.changes.values()]

    def excludes(self, other: object) -> bool:
        """Return whether both are the same fault in the same place."""
        if not isinstance(other, CallEdit):
            return False
        if self.change.stale or other.change.stale:
            return self.change.stale and other.change.stale
        return self.change.fault == other.change.fault and bool(self.sites & other.sites)

    def is_wider(self, other: object) -> bool:
        """Return whether this is the other edit at more calls; a fault of the catalogue is likely at all of them."""
        if not (isinstance(other, CallEdit) and self.change.tier):
            return False
        same = (self.change.fault, self.change.group) == (other.change.fault, other.change.group)
        return same and self.sites > other.sites


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, Mapping):
        yield from tensors_in([*value.values()])


_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# What torch does not tell, or tells in part.
_LSTM = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "training", "bidirectional", "batch_first")
_UNTOLD: dict[str, dict[str, Any]] = {
    "scaled_dot_product_attention": {
        **dict.fromkeys(("query", "key", "value"), inspect.Parameter.empty),
        **{"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False},
    },
    **{name: dict.fromkeys(_LSTM, inspect.Parameter.empty) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}


def parameters_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the parameters of a function of torch, in order, with their defaults.

    Source: the function's signature, or the one that torch tests overrides with.

    >>> import torch
    >>> parameters_of(torch.nn.functional.leaky_relu)["negative_slope"]
    0.01
    >>> [*parameters_of(torch.softmax)]
    ['input', 'dim', 'dtype']
    """
    try:
        return _parameters_of(function)
    except TypeError:  # it cannot be hashed
        return {}


@cache
def _parameters_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    if (untold := _UNTOLD.get(getattr(function, "__name__", ""))) is not None:
        return untold
    for source in (function, get_testing_overrides().get(function)):
        try:
            parameters = inspect.signature(source).parameters.values()  # type: ignore[arg-type]
        except (TypeError, ValueError):
            continue
        told = {one.name: one.default for one in parameters if one.kind in _KINDS}
        if told and "self" not in told:
            return told
    return {}
