"""Diagnosis of model and loss as a job of a torch rank, because hypotheses run the port's torch code.

Nothing here imports jax.
"""

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from jaxddp.parity.case_interface import Trajectory
from jaxddp.parity.convert import tied_names, under_all_names
from jaxddp.parity.diagnosis.forward.buffers import explain_buffers
from jaxddp.parity.diagnosis.forward.loss_causes import ModelEvidence, ModelStep, differs, search_model
from jaxddp.parity.diagnosis.forward.reading import Reading, program_of
from jaxddp.parity.diagnosis.forward.replay import Replay
from jaxddp.parity.diagnosis.search.decide import Ruling
from jaxddp.parity.diagnosis.threads import torch_threads
from jaxddp.parity.graph import needed_values
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.port.draws import DrawnSource, rates_of
from jaxddp.parity.processes import Tell, free_at_once
from jaxddp.parity.records import (
    COUNTER,
    Lazy,
    Records,
    StoredRecord,
    Tensors,
    is_large_model,
    of_loss,
    shapes_of,
    steps_in_memory,
)
from jaxddp.parity.sums import Summand
from jaxddp.parity.torch_side.made_lines import lines_of_layers, noted
from jaxddp.parity.torch_side.rank import rank_folder
from jaxddp.parity.torch_side.side import Source, TorchSide, TorchStep, make_side
from jaxddp.parity.torch_side.steps import batch_sizes
from torch_ref.distributed import World
from torch_ref.losses import Batch, LossFunction, Sums
from torch_ref.program_step import Optimizers

UNKNOWN = Ruling((), None)  # the ruling on a loss that cannot be replayed


@dataclass(frozen=True)
class ForwardDiagnosis:
    """A hypothesis search over the port's torch code.

    Attributes:
        source: the torch half.
        model: whether the loss or the local gradients differ.
        buffers: whether the buffers differ.
        steps: steps that can be compared, from 0.
        start: the reference's initial weights.
        torch_folder, jax_folder: folders of the records.
        replicas: number of replicas.
        compared: replicas that were given the same examples in all of these steps.
        between, thrifty: see `ModelEvidence`.
        loss: the loss of a `torch_step` to explain; "" if the port has one loss.
        moved: parameters whose updates are explained in place of the loss, see `ModelEvidence`.
        received: parameters whose gradients, as the step's optimizer gets them, are explained in place of the loss.
        summands: see `jaxddp.parity.sums`.
        reading: the port's program; its step is counted from 0; None: it was not read.
        world_size: number of ranks that run the job.
    """

    source: Source
    model: bool
    buffers: bool
    steps: tuple[int, ...]
    start: Arrays
    torch_folder: Path
    jax_folder: Path
    replicas: int
    compared: tuple[int, ...]
    between: tuple[str, str] | None = None
    thrifty: bool = False
    loss: str = ""
    reading: Reading | None = None
    moved: tuple[str, ...] = ()
    received: tuple[str, ...] = ()
    summands: Sequence[Summand] = ()
    world_size: int = 1

    def run(self, world: World, tell: Tell) -> tuple[Ruling | None, Ruling | None]:
        """Search; return the ruling on the model and on the buffers, None for one that does not differ.

        If the loss has no explanation, differences in the buffers may follow from it, and are not searched.
        A loss of a `torch_step` that differs as a consequence of an update does not count as different. After the
        update of a large tensor, which the records hold only as an excerpt, its ruling is `UNKNOWN`.
        """
        with self.replaying(tell) as evidence:
            try:
                if self.loss and not differs(evidence):
                    return None, None
            except UnknownWeights:
                return UNKNOWN, None
            of_model, known = search_model(evidence) if self.model else (None, ())
            buffers = self.buffers and (of_model is None or of_model.named)
            sure = known if of_model is not None and len(of_model.named) == 1 else ()
            return of_model, explain_buffers(evidence, known=sure) if buffers else None

    @contextlib.contextmanager
    def replaying(self, tell: Tell) -> Iterator[ModelEvidence]:
        """Give the reference's loss for replays; a large one gets all threads, as the other ranks wait."""
        searching = partial(tell, "the search for a cause")
        searching()
        with warnings.catch_warnings(), contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore")  # a hypothesis may divide by 0
            if is_large_model(self.start):
                free_at_once()
                stack.enter_context(torch_threads(os.cpu_count() or 1))
            yield self._evidence(searching)

    def _evidence(self, searching: Callable[[], None]) -> ModelEvidence:
        with noted(nn.Module) as made:
            side = make_side(self.source, max(self.steps) + 1, "float64")
        steps = _steps(self, side)
        loss_fn = _loss_fn(self, side, steps)
        return ModelEvidence(
            side.model,
            loss_fn,
            steps,
            self.replicas,
            side.facts.loss_normalization,
            self.compared,
            self.between,
            self.thrifty,
            rates_of(self.source.draws) if isinstance(self.source, DrawnSource) else (),
            searching,
            changes_weights=side.torch_step is not None,
            sizes=batch_sizes(steps[0].micro_batches[0], self.replicas),
            reading=self.reading and replace(self.reading, step=self.steps.index(self.reading.step)),
            moved=self.moved,
            received=(lambda: loss_fn.received) if self.received and isinstance(loss_fn, LossOfStep) else None,
            made=lines_of_layers(side.model, made),
        )


@dataclass(frozen=True)
class NeededValues:
    """Choice of the values of a large port's loss that a search needs as arrays; see `graph.needed_values`.

    Attributes:
        diagnosis: the search.
        world_size: number of ranks that run the job.
    """

    diagnosis: ForwardDiagnosis
    world_size: int = 1

    @property
    def source(self) -> Source:
        """Return the torch half."""
        return self.diagnosis.source

    def run(self, world: World, tell: Tell) -> tuple[int, ...]:
        """Return the indices of the values."""
        with self.diagnosis.replaying(tell) as evidence:
            reading = evidence.reading
            if reading is None or reading.graph is None:
                return ()
            with contextlib.suppress(UnknownWeights):
                calls = Replay(evidence).trace(reading.step, reading.rank, reads=True)
                return needed_values(reading.graph, program_of(calls))
            return ()


def _loss_fn(job: ForwardDiagnosis, side: TorchSide, steps: Sequence[ModelStep]) -> LossFunction:
    if side.torch_step is None:
        return side.loss_fn
    jax = Records([job.jax_folder])

    def after(index: int) -> Tensors:
        before, update = steps[index].state, jax[job.steps[index]]["update"]
        known = {name: x for name, x in update.items() if x.shape == before[name].shape}  # others are excerpts
        return {name: before[name] + moved for name, moved in known.items()}

    return LossOfStep(side.torch_step, job.loss, [of_step.micro_batches for of_step in steps], after)


def _explained(job: ForwardDiagnosis, record: StoredRecord) -> Tensors:
    """Return JAX's local gradients, or what is explained in their place."""
    if job.received:
        return {name: record["gradients"][name][None] for name in job.received}
    if job.moved:
        return {name: np.stack([record["update"][name]] * job.replicas) for name in job.moved}
    gradients = {} if job.loss else of_loss(record, "local_gradients")
    return {name: x for name, x in gradients.items() if name not in {one.other for one in job.summands}}


def _steps(job: ForwardDiagnosis, side: TorchSide) -> Sequence[ModelStep]:
    """Return the steps, each read from disk when it is asked for, those of a small model once."""
    torch, jax = Records([rank_folder(job.torch_folder, 0)]), Records([job.jax_folder])
    of_ranks = [side.batches(rank, job.replicas) for rank in range(job.replicas)]
    batches = list(islice(zip(*of_ranks, strict=True), max(job.steps) + 1))

    reference, tied = Trajectory(job.start, torch), tied_names(side.model)
    held = steps_in_memory(shapes_of(job.start).values()) // job.replicas  # a step has gradients of every replica

    def state(step: int) -> Arrays:
        """Return parameters and buffers before a step."""
        tensors = under_all_names(reference.before(step), tied)
        return dict(tensors) if step < held else tensors

    def make(index: int) -> ModelStep:
        step = job.steps[index]
        record = jax[step]
        spread = {name.partition(":")[2]: x for name, x in record["spread"].items() if name.startswith("buffers:")}
        return ModelStep(
            state(step),
            state(step - 1) if step else None,
            batches[step],
            np.zeros(0) if job.moved else of_loss(record, "local_loss")[job.loss or "loss"],
            _explained(job, record),
            {name: x for name, x in record["buffers"].items() if not name.endswith(COUNTER)},
            spread,
        )

    return Lazy(lambda: len(job.steps), make, keep=held)


class UnknownWeights(Exception):
    """Raised if the loss depends on weights after an update that JAX's records hold only as an excerpt."""


class LossOfStep:
    """One loss of a step whose optimizers set the parameters to JAX's.

    Losses that are computed after an update therefore have the same inputs as in JAX.

    Args:
        step: the port's step.
        name: name of the loss; "": the weights after the step count, and the loss is 0.
        batches: `[step][rank][micro-batch]`.
        after: step -> JAX's parameters after it, under torch's names; may lack some.

    Attributes:
        received: the gradients that the optimizers got in the last run, by parameter; zeros where there was none.
    """

    def __init__(
        self, step: TorchStep, name: str, batches: Sequence[Sequence[Sequence[Batch]]], after: Callable[[int], Tensors]
    ):
        self._step, self._name, self._after = step, name, after
        self.received: Tensors = {}
        self._batches = batches  # keeps the objects alive, because their ids are used
        self._number = {id(batch): k for k, ranks in enumerate(batches) for pieces in ranks for batch in pieces}

    def __call__(self, model: nn.Module, batch: Batch) -> Sums:
        """Compute the loss without its gradients.

        Raises:
            UnknownWeights: it depends on parameters that `after` lacks.
        """
        made = self._step.configure(model)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        values = self._after(self._number[id(batch)])
        self.received = {}
        for optimizer in Optimizers(made, model).each:
            optimizer.step = partial(self._leave, optimizer, names, values)  # type: ignore[assignment, method-assign]
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a scheduler warns if it does not see the optimizer's step
            loss = torch.as_tensor({"": 0.0, **self._step.losses(model, made, batch)}[self._name]).detach()
        if loss.isnan() and not values.keys() >= {*names.values()}:
            raise UnknownWeights
        return {"loss": loss, "count": torch.tensor(1.0)}

    def _leave(self, optimizer: Optimizer, names: Mapping[int, str], values: Tensors, *_: Any) -> None:
        """Note the optimizer's gradients; set its parameters to these values, or to NaN if unknown, which shows."""
        with torch.no_grad():
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                name, gradient = names[id(parameter)], parameter.grad
                given = torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
                self.received[name] = given.numpy().copy()
                if gradient is not None:
                    parameter.copy_(torch.from_numpy(values[name]) if name in values else torch.tensor(math.nan))
