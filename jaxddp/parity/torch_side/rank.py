"""One rank of torch, in a process of its own: takes jobs, writes down what it sees. Knows no jax."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from jaxddp.parity.port import Facts
from jaxddp.parity.processes import Tell, reported
from jaxddp.parity.records import Records, RecordWriter
from jaxddp.parity.torch_side.recorder import Arrays, Recorder, Watched, recording_hook, to_numpy
from jaxddp.parity.torch_side.side import TorchSide, TorchSource, to_batch
from torch_ref.data_parallel import buffers_option
from torch_ref.distributed import World, process_group
from torch_ref.losses import Batch
from torch_ref.state import averaged_model
from torch_ref.step import train_step


@dataclass(frozen=True)
class Summary:
    """What a rank says when it is done.

    Attributes:
        optimizer: the class of the optimizer.
        rates: its first group's learning rate at each step, and at the steps that would follow.
        tied: parameters that have several names.
    """

    optimizer: str
    rates: list[float]
    tied: tuple[str, ...] = ()


class Job(Protocol):
    """Something that ranks 0 .. world_size - 1 do together."""

    @property
    def world_size(self) -> int:
        """How many take part."""

    @property
    def source(self) -> TorchSource:
        """Whose code runs."""

    def run(self, world: World, tell: Tell) -> Any:
        """Do this rank's share; the answer goes back to the parent.

        Args:
            tell: keeps the parent informed of where the rank is.
        """


@dataclass(frozen=True)
class Steps:
    """Optimizer steps, recorded.

    Attributes:
        source: model, loss, optimizer, normalisation, batches.
        dtype: of parameters, buffers and inputs.
        world_size: ranks 0 .. world_size - 1 take part.
        steps: how many.
        folder: where each rank writes its records, in a folder of its own.
        weights: state_dict to start from.
        batches: per rank and step, micro-batches in place of the source's own.
        reference: folders of a run whose weights and gradients each step is given; None: a run by itself.
        ahead: for how many more steps the learning rate is told.
    """

    source: TorchSource
    dtype: str
    world_size: int
    steps: int
    folder: Path
    weights: Arrays
    batches: list[list[list[Arrays]]] | None = None
    reference: list[Path] | None = None
    ahead: int = 0

    def run(self, world: World, tell: Tell) -> Summary:
        """Take the steps."""
        tell("torch_model")
        side = self.source.torch_side(self.steps, self.dtype)
        model = side.model.train()
        model.load_state_dict({name: torch.from_numpy(array) for name, array in self.weights.items()})
        ddp = DistributedDataParallel(
            model,
            process_group=world.group,
            find_unused_parameters=side.find_unused_parameters,
            **buffers_option(side.buffers),
        )
        recorder = Recorder(model, world, side)
        ddp.register_comm_hook(recorder, recording_hook)
        tell("torch_optimizer")
        optimizer, scheduler = side.make_optimizer(model.parameters(), world)
        watched = Watched(optimizer, recorder)
        averaged = averaged_model(model, side.ema_decay)
        writer = RecordWriter(rank_folder(self.folder, world.rank))
        forced = None if self.reference is None else Records(self.reference)
        rates = []
        batches = self._batches(side, world)
        for step in range(self.steps):
            tell(f"step {step + 1}")
            micro_batches = next(batches)
            if forced is not None:
                watched.gradients = forced[step]["clipped_gradients"]
                before = self.weights if step == 0 else {**forced[step - 1]["params"], **forced[step - 1]["buffers"]}
                model.load_state_dict({name: torch.from_numpy(value) for name, value in before.items()}, strict=False)
            recorder.start(micro_batches)
            rates.append(float(optimizer.param_groups[0]["lr"]))
            sums = train_step(
                ddp,
                watched,  # type: ignore[arg-type]
                scheduler,
                micro_batches,
                world,
                loss_normalization=side.facts.loss_normalization,
                clip_grad_norm=side.facts.clip_grad_norm,
                buffers=side.buffers,
                gradient_hooks=side.gradient_hooks,
                scaler=side.scaler,
                loss_fn=recorder.loss_fn,
                count_fn=side.count_fn,
                step=step,
            )
            if averaged is not None and not sums.get("skipped"):
                averaged.update_parameters(model)
            writer.write(recorder.record(optimizer, averaged), groups=recorder.groups)
        rates += _rates_ahead(optimizer, scheduler, self.ahead)
        every = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        tied = tuple(name for name, parameter in recorder.parameters.items() if every[id(parameter)] > 1)
        return Summary(type(optimizer).__name__, rates, tied)

    def _batches(self, side: TorchSide, world: World) -> Iterator[list[Batch]]:
        if self.batches is None:
            return side.batches(world.rank, world.world_size)
        return ([to_batch(arrays, self.dtype) for arrays in step] for step in self.batches[world.rank])


@dataclass(frozen=True)
class Draw:
    """The weights that a model is made with, and the facts of its training loop.

    Attributes:
        source: model.
        dtype: of the weights.
        seed: of torch's generator.
    """

    source: TorchSource
    dtype: str
    seed: int = 0
    world_size: int = 1

    def run(self, world: World, tell: Tell) -> tuple[Arrays, Facts]:
        """Draw them."""
        tell("the port's file or torch_model")
        torch.manual_seed(self.seed)
        side = self.source.torch_side(1, self.dtype)
        return {name: to_numpy(tensor) for name, tensor in side.model.state_dict().items()}, side.facts


def rank_folder(folder: Path, rank: int) -> Path:
    """Where a rank keeps its records."""
    return folder / f"rank{rank}"


def serve(rank: int, size: int, store_file: str, connection: Connection) -> None:
    """Answer jobs until None comes: ("at", where) on the way, then ("done", answer) or ("failed", why)."""
    torch.set_num_threads(1)
    with process_group(rank, size, torch.device("cpu"), dist.FileStore(store_file, size)) as everyone:
        # Every process has to help to make a group, also those outside of it.
        groups = {count: dist.new_group(list(range(count))) for count in range(1, size + 1)}
        connection.send(("done", None))
        while (job := connection.recv()) is not None:
            world = World(rank, job.world_size, everyone.device, groups[job.world_size])
            with reported(connection, job.source.name):
                connection.send(("done", job.run(world, lambda where: connection.send(("at", where)))))


def _rates_ahead(optimizer: Optimizer, scheduler: LRScheduler | None, steps: int) -> Iterator[float]:
    """The learning rates that would follow, as far as the schedule goes."""
    optimizer.zero_grad()
    with contextlib.suppress(Exception):  # OneCycleLR ends, and a schedule of the port's own may know no more rates
        for _ in range(steps):
            yield float(optimizer.param_groups[0]["lr"])
            if scheduler is not None:
                scheduler.step()
