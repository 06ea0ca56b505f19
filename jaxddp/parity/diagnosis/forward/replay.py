"""Replay the torch loss: one step's micro-batches on some replicas, with or without faults."""

import copy
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from jaxddp.parity.diagnosis.forced.torch_graph import TorchGraph
from jaxddp.parity.diagnosis.forward.call_trace import CallTrace
from jaxddp.parity.diagnosis.forward.calls import Call, CallEdit, Gather
from jaxddp.parity.diagnosis.forward.reading import Reading
from jaxddp.parity.diagnosis.forward.sites import trace
from jaxddp.parity.excerpts import excerpt
from jaxddp.parity.lazy_arrays import Arrays, Renamed
from jaxddp.parity.operations import SourceLine
from jaxddp.parity.torch_side.rank_recorder import is_large
from jaxddp.parity.torch_side.side import load_state
from jaxddp.parity.varied import varied
from torch_ref.losses import Batch, LossFunction

TIMEOUT = 300.0  # seconds that replicas side by side wait for each other
REMEMBERED = 3  # runs of all replicas that are cached


@dataclass(frozen=True)
class ModelStep:
    """Inputs of a step, and JAX's results, under torch's names and in torch's layout.

    Attributes:
        state: torch's state dict before the step.
        previous: torch's state dict before the previous step; None: there is none.
        micro_batches: `[rank][micro-batch]` -> the batch as the torch loss takes it, in float64.
        local_loss: JAX's losses, (world_size,); of size 0 if the port does not show them.
        local_gradients: JAX's gradients, (world_size, ...); empty if the port does not show them.
        buffers: JAX's buffers after the step, on replica 0.
        all_buffers: JAX's buffers that differ between its replicas, (world_size, ...).
    """

    state: Arrays
    previous: Arrays | None
    micro_batches: Sequence[Sequence[Mapping[str, Tensor]]]
    local_loss: np.ndarray
    local_gradients: Arrays
    buffers: Arrays
    all_buffers: Arrays

    def updates_buffers(self, module: str) -> bool:
        """Return whether JAX's step changes any buffer of a module; "": of the model."""
        moved = (name for name, value in self.buffers.items() if not np.array_equal(value, self.state[name]))
        return any(not module or name.startswith(f"{module}.") for name in moved)


@dataclass(frozen=True)
class ModelEvidence:
    """Loss of the reference, and JAX's steps.

    Attributes:
        module: the reference's model, in float64.
        loss_fn: (module, batch) -> "loss", the sum of weighted losses, and "count", the sum of weights.
        steps: JAX's steps; may be loaded lazily.
        world_size: number of replicas.
        loss_normalization: "ddp" or "global", see `torch_ref.step.accumulate_gradients`.
        compared: replicas that were given the same examples on both sides; None: all.
        between: the last layer whose output is equal and the first whose output differs; one of the faults begins
            between these. None: there are no such layers.
        thrifty: replays are slow: no faults elsewhere are tried, and few once one explains everything.
        rates: the reference's dropout rate and JAX's, of each pair of masks that the loss draws.
        alive: called before each replay, to report that the search continues.
        changes_weights: the loss is that of a step, which changes the weights.
        sizes: sizes of the batch, in words, by which a sum differs from a mean.
        reading: the port's program; None: it was not read.
        moved: parameters that a step changes without an optimizer, and whose updates are explained in place of the
            loss; the programs end where they make the first of them.
        received: returns the gradients that a step's optimizers got in the last run of the loss, which are explained
            in place of the loss's; None: the loss has its own.
        made: library's module -> the user's line that makes it.
    """

    module: nn.Module
    loss_fn: LossFunction
    steps: Sequence[ModelStep]
    world_size: int
    loss_normalization: str = "ddp"
    compared: tuple[int, ...] | None = None
    between: tuple[str, str] | None = None
    thrifty: bool = False
    rates: tuple[tuple[float, float], ...] = ()
    alive: Callable[[], None] = lambda: None
    changes_weights: bool = False
    sizes: Mapping[int, str] = field(default_factory=dict)
    reading: Reading | None = None
    moved: tuple[str, ...] = ()
    received: Callable[[], Arrays] | None = None
    made: Mapping[str, SourceLine] = field(default_factory=dict)


@dataclass(frozen=True)
class MicroBatchResult:
    """Results of one micro-batch: sum and count of its losses, gradients of the sum."""

    loss: float
    count: float
    gradients: dict[str, np.ndarray]


@dataclass(frozen=True)
class ReplicaResult:
    """Results of one replica's step: one per micro-batch, and buffers and moved parameters after the step."""

    pieces: list[MicroBatchResult]
    buffers: dict[str, np.ndarray]


class Replay:
    """Runs of the evidence's steps with faults planted; the last runs are cached.

    >>> step = ModelStep({"weight": np.array([[2.0]])}, None, [[{"x": torch.ones(3, 1).double()}]], *[np.zeros(0)] * 4)
    >>> evidence = ModelEvidence(
    ...     nn.Linear(1, 1, bias=False).double(), lambda model, batch: {"loss": model(batch["x"]).sum(), "count": 3},
    ...     [step], world_size=1)
    >>> Replay(evidence).run(0, [0])[0].pieces
    [MicroBatchResult(loss=6.0, count=3.0, gradients={'weight': array([[3.]])})]
    """

    def __init__(self, evidence: ModelEvidence):
        self._evidence = evidence
        self._copies: list[nn.Module] = []
        self._loaded: dict[int, tuple[int, bool]] = {}  # module -> step, and whether its weights are stale
        self._known: OrderedDict[tuple[int, int, tuple[CallEdit, ...]], ReplicaResult] = OrderedDict()

    def run(self, step: int, ranks: Sequence[int], patches: Sequence[CallEdit] = ()) -> list[ReplicaResult]:
        """Compute the forward and backward passes of a step's micro-batches.

        Args:
            step: index into the evidence's steps.
            ranks: replicas whose results are returned.
            patches: faults.

        Raises:
            One of `fit.IMPOSSIBLE`: the loss cannot be computed with the faults.
        """
        self._evidence.alive()
        patches = tuple(patches)
        for rank in ranks:
            if (step, rank, patches) not in self._known:
                if any(patch.change.lockstep for patch in patches):
                    of_all = self._side_by_side(step, patches)
                    self._known |= {(step, other, patches): result for other, result in enumerate(of_all)}
                else:
                    self._known[step, rank, patches] = self._alone(step, rank, patches)
        results = [self._known[step, rank, patches] for rank in ranks]
        while len(self._known) > REMEMBERED * self._evidence.world_size:
            self._known.popitem(last=False)
        return results

    def trace(self, step: int, rank: int, patches: Sequence[CallEdit] = (), reads: bool = False) -> list[Call]:
        """Return the calls of the loss, with faults planted, on a replica's first micro-batch; see `sites.trace`."""
        module, taken = self._evidence.module, self._evidence.steps[step]
        self._load(module, step, patches)
        return trace(module, self._evidence.loss_fn, taken.micro_batches[rank][0], patches, reads)

    def graph(self, step: int, rank: int, way: str = "") -> TorchGraph:
        """Return the values of the loss on a replica's first micro-batch; `way`: that of `varied` parameters."""
        module, batch = self._varied_module(step, way), self._first_batch(step, rank)
        return TorchGraph(module, self._evidence.loss_fn, batch, *self._evidence.moved[:1])

    def _first_batch(self, step: int, rank: int) -> Mapping[str, Tensor]:
        return self._evidence.steps[step].micro_batches[rank][0]

    def _varied_module(self, step: int, way: str) -> nn.Module:
        """Return the module with a step's parameters; `way`: that in which they are varied."""
        module = self._evidence.module
        self._load(module, step)
        if way:
            self._loaded.pop(id(module))
            load_state(module, self.varied(step, way), strict=False)
        return module

    def varied(self, step: int, way: str) -> dict[str, np.ndarray]:
        """Return the parameters before a step, varied unless the way is ""."""
        names = dict(self._evidence.module.named_parameters())
        parameters = {name: x for name, x in self._evidence.steps[step].state.items() if name in names}
        return varied(parameters, names, way) if way else parameters

    def _load(self, module: nn.Module, step: int, patches: Sequence[CallEdit] = ()) -> None:
        """Copy a step's state into the module; large parameters only if they are not there yet."""
        taken = self._evidence.steps[step]
        stale = any(patch.change.stale for patch in patches) and taken.previous is not None
        state = taken.previous if stale and taken.previous is not None else taken.state
        there = self._loaded.get(id(module)) == (step, stale) and not self._evidence.changes_weights
        kept = {name for name, parameter in module.named_parameters() if there and is_large(parameter)}
        # Constants that are not compared are not in the state.
        load_state(module, Renamed(state, {name: name for name in state if name not in kept}), strict=False)
        self._loaded[id(module)] = step, stale

    def _alone(self, step: int, rank: int, patches: Sequence[CallEdit]) -> ReplicaResult:
        module = self._evidence.module
        self._load(module, step, patches)
        pieces = []
        for batch in self._evidence.steps[step].micro_batches[rank]:
            loss, count = _forward(module, self._evidence.loss_fn, batch, CallTrace(patches))
            of_step = self._evidence.received
            gradients = _gradients(loss, module) if of_step is None else dict(of_step())
            pieces.append(MicroBatchResult(float(loss.detach()), count, gradients))
        moved = {name: module.get_parameter(name).detach().clone().numpy() for name in self._evidence.moved}
        return ReplicaResult(pieces, _buffers(module) | moved)

    def _side_by_side(self, step: int, patches: Sequence[CallEdit]) -> list[ReplicaResult]:
        """Run all replicas at once, each in a thread, so that each replica's tensors enter the others' losses.

        As in JAX, a replica's gradient is the gradient of all losses with respect to the replica's copy of
        the parameters. With "ddp" each loss is divided by its count, and the result is multiplied by it.
        """
        evidence = self._evidence
        while len(self._copies) < evidence.world_size:
            self._copies.append(copy.deepcopy(evidence.module))
        for module in self._copies:
            self._load(module, step, patches)
        pieces: list[list[MicroBatchResult]] = [[] for _ in self._copies]
        for batches in zip(*evidence.steps[step].micro_batches, strict=True):
            exchange = _Exchange(evidence.world_size)
            forwards = [
                partial(_forward, module, evidence.loss_fn, batch, CallTrace(patches, exchange.gather(rank)))
                for rank, (module, batch) in enumerate(zip(self._copies, batches, strict=True))
            ]
            results = exchange.together(forwards)
            divisors = [1.0 if evidence.loss_normalization == "global" else count for _, count in results]
            total = torch.stack([loss / divisor for (loss, _), divisor in zip(results, divisors, strict=True)]).sum()
            for of_rank, module, (loss, count), divisor in zip(pieces, self._copies, results, divisors, strict=True):
                gradients = {name: gradient * divisor for name, gradient in _gradients(total, module).items()}
                of_rank.append(MicroBatchResult(float(loss.detach()), count, gradients))
        return [ReplicaResult(of_rank, _buffers(module)) for of_rank, module in zip(pieces, self._copies, strict=True)]


def _forward(module: nn.Module, loss_fn: LossFunction, batch: Batch, calls: CallTrace) -> tuple[Tensor, float]:
    with warnings.catch_warnings(action="ignore"), calls:  # shapes that a fault makes others
        sums = loss_fn(module, batch)
    return sums["loss"], float(sums["count"]) + calls.more


def _gradients(loss: Tensor, module: nn.Module) -> dict[str, np.ndarray]:
    """Return the gradients of all trainable parameters, excerpts of large ones; zeros where the loss needs none.

    A loss of a `torch_step` has none.
    """
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    taken: dict[str, np.ndarray] = {}

    def take(name: str, parameter: Tensor) -> None:
        """Copy a gradient as soon as it is computed; a large one is freed before the next, which reuses its memory."""
        assert parameter.grad is not None, "called when it is there"
        taken[name] = excerpt(parameter.grad.to_dense().numpy())
        parameter.grad = None

    if not (loss.requires_grad and named):
        return {}
    hooks = [x.register_post_accumulate_grad_hook(partial(take, name)) for name, x in named.items()]
    try:
        torch.autograd.backward(loss, inputs=list(named.values()), retain_graph=True)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: taken[name] if name in taken else excerpt(x.detach().numpy() * 0.0) for name, x in named.items()}


def _buffers(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: buffer.detach().clone().numpy() for name, buffer in module.named_buffers()}


class _Exchange:
    """Exchange tensors between replicas that run side by side."""

    def __init__(self, world_size: int):
        self._tensors: list[Tensor] = [torch.empty(0)] * world_size
        self._barrier = threading.Barrier(world_size)

    def gather(self, rank: int) -> Gather:
        """Return the replica's function that waits for the other replicas' tensors and returns all of them."""

        def wait(tensor: Tensor) -> Sequence[Tensor]:
            self._tensors[rank] = tensor
            self._barrier.wait(TIMEOUT)
            of_all = tuple(self._tensors)
            self._barrier.wait(TIMEOUT)  # no replica writes the next tensors before all have read these
            return of_all

        return wait

    def together(self, runs: Sequence[Callable[[], tuple[Tensor, float]]]) -> list[tuple[Tensor, float]]:
        """Run each replica in a thread and return the results; raise the first error."""
        results: list[tuple[Tensor, float] | None] = [None] * len(runs)
        errors: list[Exception] = []

        def work(rank: int) -> None:
            try:
                results[rank] = runs[rank]()
            except Exception as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(runs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [result for result in results if result is not None]
