"""One rank of torch, in a process of its own: takes jobs, writes down what it sees. Knows no jax."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from jaxddp.parity.children import Tell, reported
from jaxddp.parity.port import Facts
from jaxddp.parity.records import Record, Records, RecordWriter
from jaxddp.parity.samples import fingerprints
from jaxddp.parity.torch_side import TorchSide, TorchSource, to_batch
from torch_ref.distributed import World, process_group
from torch_ref.losses import Batch, Sums
from torch_ref.step import global_count, train_step

Arrays = dict[str, np.ndarray]


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
            model, process_group=world.group, find_unused_parameters=side.find_unused_parameters
        )
        recorder = _Recorder(model, world, side)
        ddp.register_comm_hook(recorder, _recording_hook)
        tell("torch_optimizer")
        optimizer, scheduler = side.make_optimizer(model.parameters())
        watched = _Watched(optimizer, recorder)
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
            train_step(
                ddp,
                watched,  # type: ignore[arg-type]
                scheduler,
                micro_batches,
                world,
                loss_normalization=side.facts.loss_normalization,
                clip_grad_norm=side.facts.clip_grad_norm,
                loss_fn=recorder.loss_fn,
                count_fn=side.count_fn,
            )
            writer.write(recorder.record(optimizer), groups=recorder.groups)
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
        tell("torch_model")
        torch.manual_seed(self.seed)
        side = self.source.torch_side(1, self.dtype)
        return {name: _to_numpy(tensor) for name, tensor in side.model.state_dict().items()}, side.facts


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


class _Watched:
    """An optimizer that shows what it is given and what it makes of it; its gradients may be replaced."""

    def __init__(self, optimizer: Optimizer, recorder: "_Recorder"):
        self.gradients: Arrays | None = None
        self.zero_grad = optimizer.zero_grad
        self._optimizer = optimizer
        self._recorder = recorder

    def step(self) -> None:
        recorder = self._recorder
        recorder.before_update(self._optimizer)
        if self.gradients is not None:
            for name, parameter in recorder.parameters.items():
                given = self.gradients.get(name)
                parameter.grad = None if given is None else torch.from_numpy(given).to(parameter.dtype)
        self._optimizer.step()


class _Recorder:
    """Listens to a step: the losses, the gradients before and after DDP's all-reduce, the new state."""

    def __init__(self, model: nn.Module, world: World, side: TorchSide):
        self.model = model
        self.world = world
        self.parameters = dict(model.named_parameters())
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.groups: list[dict[str, Any]] = []  # of rank 0 only
        self._side = side

    def start(self, micro_batches: Sequence[Batch]) -> None:
        self.local: Arrays = {}
        self.reduced: Arrays = {}
        self._losses: list[Sums] = []
        in_total = self._side.facts.loss_normalization == "global"
        self._total = float(global_count(micro_batches, self.world, self._side.count_fn)) if in_total else None
        self._samples = fingerprints([{name: x.numpy() for name, x in batch.items()} for batch in micro_batches])

    def loss_fn(self, model: nn.Module, batch: Batch) -> Sums:
        sums = self._side.loss_fn(model, batch)
        self._losses.append({name: value.detach() for name, value in sums.items()})
        return sums

    def before_update(self, optimizer: Optimizer) -> None:
        if self.world.rank > 0:
            return
        self._before = {name: _to_numpy(p) for name, p in self.parameters.items()}
        self._clipped = {name: _to_numpy(p.grad) for name, p in self.parameters.items() if p.grad is not None}
        self.groups = [_plain(group, self.names) for group in optimizer.param_groups]

    def record(self, optimizer: Optimizer) -> Record:
        state = {name: _to_numpy(value) for name, value in self.model.state_dict().items()}
        buffers = {name: value for name, value in state.items() if name in dict(self.model.named_buffers())}
        mine = {
            "samples": self._samples,
            "local_loss": {"loss": self._local_loss()},
            "local_gradients": self.local,
            "local_buffers": buffers,
        }
        if self.world.rank > 0:
            return mine
        return {
            **mine,
            "gradients": self.reduced,
            "clipped_gradients": self._clipped,
            "update": {name: state[name] - before for name, before in self._before.items()},
            "params": {name: state[name] for name in self.parameters},
            "buffers": buffers,
            "optimizer_state": self._state_of(optimizer),
        }

    def _state_of(self, optimizer: Optimizer) -> Arrays:
        return {
            f"{key}:{name}": _to_numpy(value)
            for name, parameter in self.parameters.items()
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.shape == parameter.shape
        }

    def _local_loss(self) -> np.ndarray:
        if self._total is not None:
            return np.asarray(sum(float(s["loss"]) for s in self._losses) * self.world.world_size / self._total)
        return np.asarray(np.mean([float(s["loss"] / s["count"]) for s in self._losses]))


def _recording_hook(recorder: _Recorder, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's own hook, with an eye on what goes in and what comes out."""
    names = [recorder.names[id(parameter)] for parameter in bucket.parameters()]
    recorder.local |= {name: _to_numpy(value) for name, value in zip(names, bucket.gradients(), strict=True)}

    def keep(future: torch.futures.Future[Tensor]) -> Tensor:
        recorder.reduced |= {name: _to_numpy(value) for name, value in zip(names, bucket.gradients(), strict=True)}
        return future.value()

    assert recorder.world.group is not None
    return allreduce_hook(recorder.world.group, bucket).then(keep)


def _rates_ahead(optimizer: Optimizer, scheduler: LRScheduler | None, steps: int) -> Iterator[float]:
    """The learning rates that would follow, as far as the schedule goes."""
    optimizer.zero_grad()
    with contextlib.suppress(ValueError):  # OneCycleLR ends
        for _ in range(steps):
            yield float(optimizer.param_groups[0]["lr"])
            if scheduler is not None:
                scheduler.step()


def _plain(group: dict[str, Any], names: dict[int, str]) -> dict[str, Any]:
    """A parameter group as JSON can hold it: the parameters' names, and all options that are numbers."""
    options = {key: _number(value) for key, value in group.items() if key != "params"}
    of_group: Iterable[nn.Parameter] = group["params"]
    return {"names": [names[id(p)] for p in of_group], **{k: v for k, v in options.items() if v is not None}}


def _number(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list) and all(isinstance(x, int | float) for x in value):
        return list(value)
    return value if isinstance(value, int | float) else None


def _to_numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().clone().numpy()
