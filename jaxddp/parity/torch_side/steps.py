"""The job that takes torch's optimizer steps and records them. Imports no jax."""

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from jaxddp.parity.case_interface import Trajectory
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.port.variants import Variant
from jaxddp.parity.processes import Tell, free_at_once
from jaxddp.parity.records import Records, RecordWriter, Tensors, full, is_large_model
from jaxddp.parity.torch_side.ddp_loop import DdpLoop
from jaxddp.parity.torch_side.multi_loss_loop import MultiLossLoop
from jaxddp.parity.torch_side.rank import hooked, rank_folder
from jaxddp.parity.torch_side.side import Source, TorchSide, load_state, make_side, to_batch
from jaxddp.parity.torch_side.variants import raised, scale_first_moments
from torch_ref.distributed import World
from torch_ref.losses import Batch

HORIZON = 10_000  # steps ahead in which to look for a warm-up's peak: schedules in float32 round relative to it


@dataclass(frozen=True)
class Summary:
    """A rank's summary of its run.

    Attributes:
        optimizer: class name of the optimizer.
        rates: learning rate of the first parameter group at each step, and at the steps that would follow.
        highest: the largest of these rates within the next `HORIZON` steps.
        tied: parameters with several names.
        sizes: see `batch_sizes`.
        raised: what the loss raises for the variant of the step after the recorded ones; "": nothing.
    """

    optimizer: str
    rates: list[float]
    highest: float = 0.0
    tied: tuple[str, ...] = ()
    sizes: Mapping[int, str] = field(default_factory=dict)
    raised: str = ""


def batch_sizes(micro_batches: Sequence[Batch], replicas: int) -> dict[int, str]:
    """Return the factors above 1 by which a sum over a batch may differ from a mean, each with the axes it counts.

    >>> batch_sizes([{"ids": torch.ones(4, 7, dtype=torch.int64)}], 1)
    {4: 'the batch', 28: 'the batch and the sequence', 7: 'the sequence'}
    """
    batch, pieces = micro_batches[0], len(micro_batches)
    examples = next((len(x) for x in batch.values() if x.ndim), 1)
    of_batch = [(examples, "the batch" if pieces == 1 else "the micro-batch"), (pieces * examples, "the batch")]
    of_batch += [(replicas * pieces * examples, "the batches of all replicas")]
    pairs = [*of_batch]
    for name, x in sorted(batch.items(), key=lambda item: item[1].is_floating_point()):
        second = f'axis 1 of "{name}"' if x.is_floating_point() or x.ndim > 2 else "the sequence"
        inner = [(size, second) for size in x.shape[1:2]] + [(math.prod(x.shape[1:]), f'the elements of "{name}"')]
        for size, what in inner:
            pairs += [(count * size, f"{of} and {what}") for count, of in of_batch] + [(size, what)]
    sizes = dict(reversed(pairs))
    return {size: sizes[size] for size in dict(pairs) if size > 1}


@dataclass(frozen=True)
class Steps:
    """A job that takes optimizer steps and records them.

    Attributes:
        source: model, loss, optimizer, normalisation, batches.
        dtype: dtype of parameters, buffers and inputs.
        world_size: number of ranks that take part.
        steps: number of steps.
        folder: parent of the ranks' folders of records.
        weights: state_dict to start from.
        batches: per rank and step, micro-batches that replace the source's.
        reference: folders of a run; each step uses its weights and gradients; None: a free run.
        ahead: number of further steps whose learning rates are reported.
        shares: the ranks of a large model may share their parameters; see `SharedParameters`.
        rounding: folder of records whose "gradients" are added, step by step, to those that the optimizers get.
        given: folder of records whose "clipped_gradients" the optimizers of a free run get in place of the run's.
        variants: changes of the steps, in place of these; the first whose loss raises ends the run.
    """

    source: Source
    dtype: str
    world_size: int
    steps: int
    folder: Path
    weights: Arrays
    batches: list[list[list[Tensors]]] | None = None
    reference: list[Path] | None = None
    ahead: int = 0
    shares: bool = False
    rounding: Path | None = None
    given: Path | None = None
    variants: tuple[Variant, ...] = ()

    def run(self, world: World, tell: Tell) -> Summary:
        """Take the steps."""
        tell("torch_model")
        is_large = is_large_model(self.weights)
        if is_large:
            free_at_once()
        side = make_side(self.source, self.steps, self.dtype)
        model = side.model.to(world.device)
        load_state(model, self.weights)
        writer = RecordWriter(rank_folder(self.folder, world.rank))
        free = self.reference is None
        loop: DdpLoop | MultiLossLoop
        if side.torch_step is not None:
            loop, shared = MultiLossLoop(side, world, free, tell), None
        else:
            loop = DdpLoop(side, world, free, tell, self.folder if is_large and self.shares else None)
            shared = loop.shared
        reference = None if self.reference is None else Trajectory(self.weights, Records(self.reference))
        made = None if self.given is None else Records([self.given])
        rates, why, steps = list[float](), "", len(self.variants) or self.steps
        batches = self._batches(side, world)
        for step in range(steps):
            tell(f"step {step + 1}")
            micro_batches = next(batches)
            given: Arrays | None = None if made is None else made[step]["clipped_gradients"]
            if reference is not None:
                before = reference.before(step)
                if shared is not None:
                    before = shared.mine(before)
                # Not strict: records lack constants that are not compared; only rank 0 loads shared parameters.
                load_state(model, before, strict=False)
                # With shared parameters, rank 0 makes the updates of all.
                if shared is None or world.rank == 0:
                    record = reference.records[step]
                    given = full(record, "clipped_gradients") if "clipped_gradients" in record else None
            if shared is not None:
                shared.wait()  # rank 0 may still be writing the parameters that the others read
            if self.variants:
                if why := raised(side, micro_batches, world):
                    break
                scale_first_moments(loop.optimizer, self.variants[step].moments)
            rates.append(float(loop.optimizer.param_groups[0]["lr"]))
            with self._rounded(loop, step):
                record, is_last = loop.take(micro_batches, step, given, made is not None), step == steps - 1
            # Forced steps start from the parameters of the step before; none follows the last.
            writer.write(record, loop.recorder.full(params=not is_last), groups=loop.recorder.groups)
        rates += _rates_ahead(loop, HORIZON if self.ahead and loop.schedulers else self.ahead)
        names = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        tied = tuple(name for name, parameter in loop.recorder.parameters.items() if names[id(parameter)] > 1)
        sizes = batch_sizes(micro_batches, world.world_size)
        return Summary(loop.kind, rates[: self.steps + self.ahead], max(rates, default=0.0), tied, sizes, why)

    @contextlib.contextmanager
    def _rounded(self, loop: DdpLoop | MultiLossLoop, step: int) -> Iterator[None]:
        """Add the step's rounding to the gradients that optimizers get, if there is any."""
        if self.rounding is None:
            yield
            return
        rounding, names = Records([self.rounding])[step]["gradients"], loop.recorder.names

        def add(optimizer: Any, *_: Any) -> None:
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                name, gradient = names[id(parameter)], parameter.grad
                if gradient is not None and name in rounding:
                    gradient += perturbation(gradient, rounding[name])

        with hooked(register_optimizer_step_pre_hook(add)):
            yield

    def _batches(self, side: TorchSide, world: World) -> Iterator[list[Batch]]:
        of_steps = side.batches(world.rank, world.world_size)
        if self.batches is not None:
            of_steps = ([to_batch(arrays, self.dtype) for arrays in step] for step in self.batches[world.rank])
        for step in of_steps:
            yield [{name: tensor.to(world.device) for name, tensor in batch.items()} for batch in step]


def perturbation(gradient: Tensor, rounding: np.ndarray) -> Tensor:
    """Return a gradient's rounding; where only an excerpt of it is known, its size for each element that is not 0.

    >>> perturbation(torch.tensor([0.0, 2.0, 2.0]), np.array([3.0]))
    tensor([0., 3., 3.])
    """
    given = torch.from_numpy(rounding).to(gradient)
    return given if given.shape == gradient.shape else given.square().mean().sqrt() * (gradient != 0)


def _rates_ahead(loop: DdpLoop | MultiLossLoop, steps: int) -> Iterator[float]:
    """Yield the learning rates of the steps that would follow, until the schedule ends."""
    loop.optimizer.zero_grad()
    with contextlib.suppress(Exception):  # OneCycleLR raises after its last step, and a port's schedule may too
        for _ in range(steps):
            yield float(loop.optimizer.param_groups[0]["lr"])
            for scheduler in loop.schedulers:
                scheduler.step()
