"""The reference's loss as a graph of values, and the values that it computes from others. Imports no jax."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from jaxddp.parity.diagnosis.forward.call_trace import CallTrace, answered
from jaxddp.parity.diagnosis.forward.calls import Call, CallEdit, Proceed, Site, tensors_in
from jaxddp.parity.diagnosis.forward.edits import numbers_of
from jaxddp.parity.diagnosis.forward.sites import naming
from jaxddp.parity.graph import ARGUMENT, Graph, Node
from jaxddp.parity.operations import moments, variables_of_user
from torch_ref.losses import Batch, LossFunction

MOST_BYTES = 2**30  # of the values that are kept; further ones cannot be forced
LARGE = 2**20  # elements of a weight that is shared with the model
CASTS = ("float", "double", "half", "bfloat16", "type_as")  # in a float64 run they change nothing
DRAWS = (  # not computed again
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("bernoulli", "multinomial", "normal"),
)
WRITTEN = "written in place"  # a value that a call has written through a view of it


class GraphTrace(CallTrace):
    """Context manager that records the calls of a loss, and every value when it is computed.

    Args:
        modules: names of the modules that are being executed.
        names: id of a parameter, a buffer or an entry of the batch -> its name.

    Attributes:
        nodes: the values.
        calls: the calls; a node's `call` is an index of these.
        held: for each value, the tensor; its memory may have been written to since.
        variables: index of a value -> name of the user's variable that holds it when it is used.
        without_gradient: numbers of the calls in a `no_grad` block.
    """

    def __init__(self, modules: list[str], names: Mapping[int, str]):
        super().__init__(modules=modules, reads=True)
        self.nodes: list[Node] = []
        self.calls: list[Call] = []
        self.held: list[Tensor] = []
        self.variables: dict[int, str] = {}
        self.without_gradient: set[int] = set()
        self._names = names
        self._index: dict[int, int] = {}  # id of a tensor -> its node
        self._versions: list[int] = []
        self._held_bytes = 0
        self._writers: dict[int, list[int]] = defaultdict(list)  # memory -> the nodes that wrote to it

    def _called(
        self,
        site: Site,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Proceed,
        within: Site | None = None,
    ) -> Any:
        if run is not Call.run:  # its inner calls are recorded
            return super()._called(site, func, args, kwargs, run, within)
        inputs = tuple(self._node_of(x) for x in tensors_in((args, kwargs)))
        held = {id(x): name for name, x in variables_of_user().items() if isinstance(x, Tensor)}
        known = zip(inputs, tensors_in((args, kwargs)), strict=True)
        self.variables |= {k: held[id(x)] for k, x in known if id(x) in held and k not in self.variables}
        versions = [x._version for x in tensors_in((args, kwargs))]
        result = super()._called(site, func, args, kwargs, run, within)
        changed = [x for x, version in zip(tensors_in((args, kwargs)), versions, strict=True) if x._version != version]
        results = [*tensors_in(result)] or changed[:1]
        if not results:
            return result
        call = self.recorded[-1]
        inputs = () if call.name in DRAWS else inputs
        self.calls.append(call)
        if not torch.is_grad_enabled():
            self.without_gradient.add(len(self.calls) - 1)
        for output, x in enumerate(results):
            index = self._add(x, call.words, inputs, output, call)
            if changed:
                self._writers[x.untyped_storage().data_ptr()].append(index)
        return result

    def value_of(self, x: Tensor) -> int:
        """Return the value that a tensor holds at the end; a number that was read is the last that is equal to it.

        Raises:
            ValueError: it is the result of no call that was recorded.
        """
        index = None if id(x) not in self._index else self._written(x, self._index[id(x)])
        source = len(self.nodes) if index is None else self._source(index)
        if index is not None and (self.nodes[source].inputs or self.nodes[source].call == ARGUMENT or x.numel() != 1):
            return index
        near, values = torch.finfo(x.dtype).eps, enumerate(self.held[:source])
        same = [k for k, one in values if one.numel() == 1 and math.isclose(float(one), float(x), rel_tol=near)]
        if not same:
            raise ValueError("the loss is the result of no call that was recorded")
        return same[-1]

    def _source(self, index: int) -> int:
        """Return the value from which calls of a single tensor make another one, as `detach` does."""
        while len(self.nodes[index].inputs) == 1:
            (index,) = self.nodes[index].inputs
        return index

    def _node_of(self, x: Tensor) -> int:
        """Return the value that a tensor holds now."""
        index = self._index.get(id(x))
        if index is None:
            return self._add(x, self._names.get(id(x), "a constant"))
        return index if self._versions[index] == x._version else self._written(x, index)

    def _written(self, x: Tensor, index: int) -> int:
        """Return a value of a tensor after all that was written to its memory since; `data` counts versions apart."""
        writers = [k for k in self._writers[x.untyped_storage().data_ptr()] if k > index]
        places = [_Place.of(self.held[k]) for k in (index, *writers)]
        if not writers or places[-1] == places[0]:
            return writers[-1] if writers else index
        call = Call((WRITTEN, len(self.calls)), partial(_written, places), (x, *(self.held[k] for k in writers)), {})
        self.calls.append(call)
        return self._add(x, WRITTEN, (index, *writers), 0, call)

    def _add(
        self, x: Tensor, name: str, inputs: tuple[int, ...] = (), output: int = 0, call: Call | None = None
    ) -> int:
        number = ARGUMENT if call is None else len(self.calls) - 1
        value = x.detach().to_dense().resolve_conj().resolve_neg().numpy()
        array: np.ndarray | None = value  # a large weight is not copied
        if not (isinstance(x, nn.Parameter) and value.size > LARGE):
            array = value.copy() if self._held_bytes + value.nbytes <= MOST_BYTES else None
            self._held_bytes += 0 if array is None else value.nbytes
        line = (None, ()) if call is None else (call.line, call.callers)
        numbers = () if call is None or name == WRITTEN else tuple(numbers_of(call))
        known = moments(value.view(value.real.dtype) if value.dtype.kind == "c" else value)
        self.nodes.append(Node(name, number, output, inputs, numbers, *line, known, array))
        self.held.append(x)
        self._versions.append(x._version)
        self._index[id(x)] = len(self.nodes) - 1
        return len(self.nodes) - 1


class TorchGraph:
    """The reference's loss on a micro-batch, recorded; its values can be computed again from others.

    Args:
        module, loss_fn, batch: what runs.
        parameter: name of a parameter whose value after the loss is the end; "": the loss is.

    Attributes:
        graph: the values.
        parameter: see above.
        calls: the calls that compute them.
        recorded: all calls, also those that return no tensor.
        variables: index of a value -> name of the user's variable that holds it.

    >>> loss = TorchGraph(nn.ReLU(), lambda model, batch: {"loss": (2 * model(batch["x"])).sum()}, {"x": torch.ones(3)})
    >>> [(node.name, node.inputs) for node in loss.graph]
    [('x', ()), ('relu', (0,)), ('mul', (1,)), ('sum', (2,))]
    >>> loss.called(1, [np.array([1.0, 2.0, 3.0])])
    [array([2., 4., 6.], dtype=float32)]

    >>> loss.cotangents()[1]
    array([2., 2., 2.], dtype=float32)
    """

    def __init__(self, module: nn.Module, loss_fn: LossFunction, batch: Batch, parameter: str = ""):
        named = {**dict(batch), **dict(module.named_buffers()), **dict(module.named_parameters())}
        names = {id(x): name for name, x in named.items()}
        with naming(module) as modules, GraphTrace(modules, names) as trace:
            loss = loss_fn(module, batch)["loss"]
            end = trace.value_of(module.get_parameter(parameter) if parameter else loss)
        self.graph, self.parameter = Graph(map(_unchanged, trace.nodes), end), parameter
        self.calls, self.recorded, self.variables = trace.calls, trace.recorded, trace.variables
        self._held, self._without_gradient = trace.held, trace.without_gradient

    def called(
        self,
        number: int,
        inputs: Sequence[np.ndarray],
        edits: Sequence[CallEdit] = (),
        earlier: Callable[[Site], Any] = lambda site: None,
    ) -> list[np.ndarray]:
        """Make a call with other arrays, in the order of its tensors, and return its results.

        Args:
            number: number of the call.
            inputs: the arrays.
            edits: faults at its site, which are planted in it.
            earlier: see `calls.Call`.

        Raises:
            One of `fit.IMPOSSIBLE`: it cannot be made with these.
        """
        with torch.no_grad():
            made = self._results(number, self._given(number, inputs), edits, earlier)
        return [x.detach().to_dense().numpy() for x in made]

    def cotangents(
        self, edits: Mapping[int, Sequence[CallEdit]] | None = None, forced: Mapping[int, np.ndarray] | None = None
    ) -> dict[int, np.ndarray]:
        """Return the gradient of the loss with respect to every value that has one.

        Args:
            edits: number of a call -> the faults that are planted in it, of its gradient only.
            forced: index of a value -> the cotangent that it is given.

        Raises:
            One of `fit.IMPOSSIBLE`: a call cannot be made again.
        """
        end = self._differentiated()
        found = {end: np.ones_like(self.graph[end].array)}
        for number in sorted(self.graph.outputs.keys() - {ARGUMENT}, reverse=True):
            outputs = self.graph.outputs[number]
            found |= {k: (forced or {})[k] for k in outputs if k in (forced or {})}
            if found.keys().isdisjoint(outputs):
                continue
            parts = self._pulled_back(number, [found.get(k) for k in outputs], (edits or {}).get(number, ()))
            for k, part in zip(self._sources[number], parts, strict=True):
                if part is not None:
                    found[k] = np.asarray(found[k] + part) if k in found else part
        return found | {k: x for k, x in (forced or {}).items() if self.graph[k].call == ARGUMENT}

    def _differentiated(self) -> int:
        """Return the value whose gradients are taken: the loss, or what a step detaches before it returns it."""
        index = self.graph.end
        while not self.has_gradient(index):
            if len(self.graph[index].inputs) != 1:
                return self.graph.end
            (index,) = self.graph[index].inputs
        return index

    def tensor(self, index: int) -> Tensor:
        """Return the tensor that holds a value; its memory may have been written to since."""
        return self._held[index]

    def has_gradient(self, index: int) -> bool:
        """Return whether a value is a parameter, or passes its gradient on to one."""
        return self._held[index].requires_grad

    def passes_gradient(self, number: int) -> bool:
        """Return whether a call passes the gradient of its result on."""
        return number not in self._without_gradient and self.has_gradient(self.graph.outputs[number][0])

    def _pulled_back(
        self, number: int, cotangents: Sequence[np.ndarray | None], edits: Sequence[CallEdit]
    ) -> list[np.ndarray | None]:
        """Return what a call makes of its results' cotangents, for each of its tensors."""
        sources = self._sources[number]
        given = self._given(number, [self.graph[k].array for k in sources])
        floats = [x.requires_grad_() for x in given if x.is_floating_point()]
        copies = [x.clone() for x in given]  # a call may work in place
        with torch.set_grad_enabled(number not in self._without_gradient):
            made = self._results(number, copies, edits)
        pairs = [(x, torch.from_numpy(c)) for x, c in zip(made, cotangents, strict=True) if c is not None]
        pairs = [(x, c.to(x.dtype)) for x, c in pairs if x.grad_fn is not None]  # a view without gradients has none
        if not (pairs and floats):
            return [None] * len(given)
        results, of_results = zip(*pairs, strict=True)
        parts = iter(torch.autograd.grad(results, floats, of_results, allow_unused=True))
        of_given = [next(parts) if x.is_floating_point() else None for x in given]
        return [None if part is None else part.to_dense().numpy() for part in of_given]

    def _given(self, number: int, inputs: Sequence[np.ndarray]) -> list[Tensor]:
        sources = [self._held[k] for k in self._sources[number]]
        return [torch.from_numpy(np.array(x)).to(y.dtype) for x, y in zip(inputs, sources, strict=True)]

    def _results(
        self,
        number: int,
        given: Sequence[Tensor],
        edits: Sequence[CallEdit],
        earlier: Callable[[Site], Any] = lambda site: None,
    ) -> list[Tensor]:
        """Make a call with other tensors."""
        call, results = self.calls[number], [self._held[k] for k in self.graph.outputs[number]]
        if call.name in DRAWS:
            return [x.detach() for x in results]
        if call.name in CASTS and not edits:
            return [given[0].to(results[0].dtype)]
        args, kwargs = _with_tensors((call.args, dict(call.kwargs)), iter(given))
        result = answered(replace(call, args=args, kwargs=kwargs, earlier=earlier), list(edits), Call.run)
        return [*tensors_in(result)] or [*given[:1]]

    def earlier(self, arrays: Mapping[int, Any], before: int) -> Callable[[Site], Tensor]:
        """Return the function that gives a call the last result at a site before it, see `calls.Call`.

        Args:
            arrays: for each value, the array.
            before: number of the call.
        """

        def last(site: Site) -> Tensor:
            number = max(n for n in range(before) if self.calls[n].site == site)
            return torch.from_numpy(np.array(arrays[self.graph.outputs[number][0]]))

        return last

    @cached_property
    def _sources(self) -> dict[int, tuple[int, ...]]:
        return {node.call: node.inputs for node in self.graph}


def _unchanged(node: Node) -> Node:
    """Return a value, without its array if that is a large weight that the loss has changed."""
    if node.array is None or node.call != ARGUMENT or node.size <= LARGE or moments(node.array) == node.moments:
        return node
    return replace(node, array=None)


class _Place(NamedTuple):
    """Where in its memory a tensor is."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, x: Tensor) -> "_Place":
        return cls(tuple(x.size()), x.stride(), int(x.storage_offset()))

    @property
    def end(self) -> int:
        return self.offset + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True)) + 1


def _written(places: Sequence[_Place], *tensors: Tensor) -> Tensor:
    """Return the first tensor after the others have been written to the memory that they share."""
    memory = torch.zeros(max(place.end for place in places), dtype=tensors[0].dtype)
    for place, x in zip(places, tensors, strict=True):
        memory.as_strided(*place).copy_(x)
    return memory.as_strided(*places[0]).clone()


def _with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return nested arguments with other tensors, in the order of `tensors_in`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple | list):
        return type(value)(*_each(value, tensors)) if hasattr(value, "_fields") else type(value)(_each(value, tensors))
    if isinstance(value, Mapping):
        return {key: _with_tensors(one, tensors) for key, one in value.items()}
    return value


def _each(values: Sequence[Any], tensors: Iterator[Tensor]) -> list[Any]:
    return [_with_tensors(one, tensors) for one in values]
