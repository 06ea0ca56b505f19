"""Plant faults in a torch loss: while it runs, some function calls return something else.

Functions that compute much in one call are opened: see `composites`.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from jaxddp.parity.diagnosis.forward.calls import OF, Call, CallEdit, Gather, Proceed, Site, tensors_in
from jaxddp.parity.diagnosis.forward.composites import (
    ATTENTION,
    OPENED,
    cells_of,
    dropout,
    numbers_of_dropout,
    opened_attention,
    run_recurrent,
)
from jaxddp.parity.operations import calling_lines, library_function, lines_of_user, moments, place_of_user


class CallTrace(TorchFunctionMode):
    """Context manager that counts calls and replaces those at the patched sites.

    It restores grad mode at its end: a fault can be in the call that ends a `no_grad` block.

    Args:
        patches: the faults.
        gather: see `Call`.
        modules: names of the modules that are being executed, innermost last; calls are recorded if given.
        reads: record lines and moments, too, and the inner calls of recurrent layers.

    Attributes:
        recorded: the calls in order; empty without `modules`.
        more: sum of the numbers added to the count.

    >>> import torch
    >>> from jaxddp.parity.diagnosis.forward.calls import Change
    >>> gelu = Change("gelu_approximation", "", lambda call, proceed, _: proceed(call.but(approximate="tanh")))
    >>> with CallTrace([CallEdit(gelu, frozenset({("gelu", 1)}))]):
    ...     [torch.nn.functional.gelu(torch.tensor([1.0, 2.0])) for _ in range(2)]
    [tensor([0.8413, 1.9545]), tensor([0.8412, 1.9546])]
    """

    def __init__(
        self,
        patches: Iterable[CallEdit] = (),
        gather: Gather = lambda tensor: (tensor,),
        modules: list[str] | None = None,
        reads: bool = False,
    ):
        super().__init__()
        self._patches: dict[Site, list[CallEdit]] = defaultdict(list)
        # Values are set before the changes that depend on them.
        patches = sorted(patches, key=lambda patch: (not patch.change.lockstep, patch.value is None))
        for patch in patches:
            for site in patch.sites:
                self._patches[site].append(patch)
        self._wanted = {site for patch in patches for one in patch.all_changes for site in one.needs}
        self._earlier: dict[Site, Any] = {}
        self._gather = gather
        self._modules, self._reads = modules, reads
        sites = {*self._patches, *self._wanted}
        self._opens = reads or any(OF in name for name, _ in sites)  # a fused layer is faster
        self._cells: dict[int, tuple[int, int, Any]] = {}  # id of a weight -> first cell, number of cells, the weight
        self._counter: Counter[str] = Counter()
        self._makers: dict[int, Call] = {}
        self._with_gradients: list[bool] = []  # one for each time that it was entered
        self.recorded: list[Call] = []
        self.more = 0.0

    def __enter__(self) -> Self:
        self._with_gradients.append(torch.is_grad_enabled())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_grad_enabled(self._with_gradients.pop())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        if name == ATTENTION:
            with self:
                return opened_attention(func)(*args, **kwargs)
        site = name, self._counter[name]
        self._counter[name] += 1
        if self._opens and name in OPENED and site not in self._patches:
            return OPENED[name](partial(self._inner, site, site[1]), *args, **kwargs)
        if func is F.dropout and (numbers := numbers_of_dropout(*args, **kwargs)) is not None:
            func, kwargs = dropout, {**kwargs, "numbers": numbers}
        run: Proceed = Call.run
        if self._opens and not kwargs and (cells := cells_of(name, args)):
            run = partial(self._opened, self._first_cell(args, cells))
        return self._called(site, func, args, kwargs, run)

    def _called(
        self,
        site: Site,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Proceed,
        within: Site | None = None,
    ) -> Any:
        """Make a call with its faults, and record it; `run` makes it without."""
        patches = self._patches.get(site, ())
        if not patches and self._modules is None and site not in self._wanted and run is Call.run:
            return func(*args, **kwargs)
        call = Call(site, func, args, kwargs, None, self._count_more, self._gather, self._earlier.get, within=within)
        result = answered(call, list(patches), run)
        if site in self._wanted:
            self._earlier[site] = result
        if self._modules is not None:
            self._record(call, result)
        return result

    def _first_cell(self, args: tuple[Any, ...], cells: int) -> int:
        """Return the number of the first cell of a recurrent layer, the same whenever the layer is called."""
        weight = args[2][0] if isinstance(args[2], list) else args[2]
        first = sum(count for _, count, _ in self._cells.values())
        return self._cells.setdefault(id(weight), (first, cells, weight))[0]

    def _opened(self, first: int, call: Call) -> Any:
        """Make a call of a recurrent layer by its inner calls."""

        def make(cell: int, *inner: Any) -> Any:
            return self._inner(call.site, first + cell, *inner)

        return run_recurrent(call.name, call.args, make)

    def _inner(self, within: Site, number: int, part: str, function: Callable[..., Any], *args: Any) -> Any:
        """Make an inner call of a call; `number`: that of its cell, or of the call itself."""
        return self._called((f"{function.__name__}{OF}{part}", number), function, args, {}, Call.run, within)

    def _count_more(self, number: float) -> None:
        self.more += number

    def _record(self, call: Call, result: Any) -> None:
        module = self._modules[-1] if self._modules else None
        real = (x for x in tensors_in(result) if self._reads and not x.is_complex())
        results = tuple(moments(x.detach().to_dense().numpy()) for x in real)
        lines = lines_of_user(calling_lines()) if self._reads else ()
        line, callers = next(iter(lines), None), lines[1:]
        call = replace(call, module=module, result=result, line=line, callers=callers, results=results)
        if self._reads:
            call = replace(call, caller=library_function(), place=place_of_user())
        if call.args and id(call.args[0]) in self._makers:
            self._makers[id(call.args[0])].into.append(call)
        self.recorded.append(call)  # keeps the result alive, so that no other object gets its id
        self._makers[id(result)] = call


def answered(call: Call, patches: list[CallEdit], run: Proceed) -> Any:
    if not patches:
        return run(call)
    patch = patches[0]
    return patch.changes.get(call.site, patch.change).answer(
        call, lambda call: answered(call, patches[1:], run), 0.0 if patch.value is None else patch.value
    )
