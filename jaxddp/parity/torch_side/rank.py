"""Jobs of a torch rank, and the child process that runs them. Imports no jax."""

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from jaxddp.errors import InputError
from jaxddp.parity.case_interface import Trajectory
from jaxddp.parity.held_types import HeldTypes
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.port import Facts, errors_located
from jaxddp.parity.port.draws import Draw
from jaxddp.parity.port.variants import Variant
from jaxddp.parity.processes import Tell, free_at_once, reported, telling
from jaxddp.parity.records import Records, RecordWriter, Tensors, full, is_large_model
from jaxddp.parity.stored_tensors import StoredTensors, write_tensors
from jaxddp.parity.torch_side.ddp_loop import DdpLoop
from jaxddp.parity.torch_side.draws import NotedDraws
from jaxddp.parity.torch_side.held_types import held_types, own_defaults
from jaxddp.parity.torch_side.multi_loss_loop import MultiLossLoop
from jaxddp.parity.torch_side.side import (
    BuiltIn,
    Source,
    TorchSide,
    default_dtype,
    make_side,
    side_of_port,
    to_batch,
)
from jaxddp.parity.torch_side.variants import raised, scale_first_moments
from torch_ref.distributed import CPU, World, process_group
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


class TorchJob(Protocol):
    """A job for ranks 0 .. world_size - 1 together."""

    @property
    def world_size(self) -> int:
        """Number of ranks that take part."""

    @property
    def source(self) -> Source:
        """Model or port whose code runs."""

    def run(self, world: World, tell: Tell) -> Any:
        """Do this rank's share and return the answer, which is sent to the parent.

        Args:
            world: the ranks that take part.
            tell: reports to the parent what the rank is doing.
        """


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
        given: folder of records whose "clipped_gradients" the optimizers of a free run get in place of their own.
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
                # Not strict: records lack constants that are not compared; rank 0 alone loads shared parameters.
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


@dataclass(frozen=True)
class DrawWeights:
    """A job that draws a model's initial weights and returns them with the facts of its training loop.

    The first batch is made twice, to check that both are equal. Its loss is computed once, to see which dtypes it casts
    to and which random numbers it draws.

    Attributes:
        source: makes the model.
        dtype: dtype of the weights.
        path: new folder to write the weights to.
        seed: seed of torch's generator.
        world_size: always 1; rank 0 draws for all.
    """

    source: Source
    dtype: str
    path: Path
    seed: int = 0
    world_size: int = 1

    def run(
        self, world: World, tell: Tell
    ) -> tuple[StoredTensors, Facts, tuple[Draw, ...] | InputError, HeldTypes | None]:
        """Draw the weights; return them, the facts, the loss's draws or why it cannot be computed, and a port's types.

        The types are those that its torch half holds as written; None: a built-in model's.
        """
        tell("the port's file or torch_model")
        torch.manual_seed(self.seed)
        with own_defaults(self.source.name) as own:
            port = None if isinstance(self.source, BuiltIn) else self.source.port()
            side = make_side(self.source, 1, self.dtype) if port is None else side_of_port(port, 1, self.dtype)
        write_tensors(self.path, {name: x.detach().cpu().numpy() for name, x in side.model.state_dict().items()})
        tell("batch(0, 0)")
        batches: list[list[Batch]] = []
        with contextlib.suppress(Exception):  # the run reports the error
            batches += [next(side.batches(0, 1)) for _ in range(2)]
        if batches and not _same(*batches):
            raise InputError("batch(0, 0): returns other values at its second call; must depend on step and rank alone")
        tell("torch_loss")
        draws = _draws_of(side, batches, self.source.name)
        facts = replace(side.facts, casts=tuple(sorted(side.casts)), moves_weights=_moved(side.model, self.path))
        tell("torch_optimizer")
        types = None if port is None else held_types(port, own, not is_large_model(StoredTensors(self.path)))
        return StoredTensors(self.path), facts, draws, types


def _moved(model: nn.Module, path: Path) -> bool:
    """Return whether parameters of a large model differ from those in a folder."""
    there, parameters = StoredTensors(path), model.named_parameters()
    return is_large_model(there) and any(not np.array_equal(x.detach().cpu().numpy(), there[n]) for n, x in parameters)


def _draws_of(side: TorchSide, batches: list[list[Batch]], name: str) -> tuple[Draw, ...] | InputError:
    """Return the draws of the loss for the first of these batches, or why it cannot be computed."""
    try:
        with errors_located(name), NotedDraws(side.model) as noted:
            _compute(side, batches[0][0])
    except InputError as error:  # the run reports it
        with contextlib.suppress(Exception):  # it may fail only under NotedDraws; compute it again to see its casts
            _compute(side, batches[0][0])
        return error
    return tuple(noted.draws)


def _compute(side: TorchSide, batch: Batch) -> None:
    """Compute the loss, or take its `torch_step`."""
    model = side.model
    if side.torch_step is None:
        side.loss_fn(model, batch)
    else:
        side.torch_step.losses(model, side.torch_step.configure(model), batch)


def _same(one: list[Batch], other: list[Batch]) -> bool:
    """Return whether two lists of micro-batches hold the same values; NaN equals NaN."""
    pairs = [(tensor, b[name]) for a, b in zip(one, other, strict=True) for name, tensor in a.items()]
    return all(torch.allclose(x, y, rtol=0, atol=0, equal_nan=True) for x, y in pairs)


def rank_folder(folder: Path, rank: int) -> Path:
    """Return the folder of a rank's records."""
    return folder / f"rank{rank}"


def load_state(model: nn.Module, state: Arrays, strict: bool = True) -> None:
    """Copy a state_dict of NumPy arrays into the model, one at a time.

    Args:
        model: the model.
        state: the arrays.
        strict: raise `KeyError` if one is missing or left over.
    """
    tensors = model.state_dict()
    if strict and (odd := sorted(tensors.keys() ^ state.keys())):
        raise KeyError(f"missing or left over: {', '.join(odd)}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in state:
                tensor.copy_(torch.from_numpy(state[name]))


def serve(rank: int, size: int, platform: str, store_file: str, connection: Connection) -> None:
    """Run jobs until None arrives; each reports its progress, then ("done", answer) or ("failed", why).

    With `platform` "gpu", the ranks share the GPUs, by NCCL if each has its own, else by Gloo.
    """
    torch.set_num_threads(1)  # the ranks share the machine's cores
    with reported(connection, "--torch-platform"):
        device = device_of(rank, platform)
    connected_by = device if torch.cuda.device_count() >= size else CPU
    with process_group(rank, size, connected_by, dist.FileStore(store_file, size)):
        torch.backends.cudnn.allow_tf32 = False  # torch's default for convolutions rounds to 10 bits
        # `new_group` is collective: every process must call it for every group, including those outside the group.
        groups = {count: dist.new_group(list(range(count))) for count in range(1, size + 1)}
        connection.send(("done", None))
        while (job := connection.recv()) is not None:
            world = World(rank, job.world_size, device, groups[job.world_size])
            # Constants that a port's loss makes get the run's dtype, also in the threads of a replay.
            dtype = getattr(job, "dtype", "float64") if hasattr(job.source, "port") else "float32"
            with reported(connection, job.source.name), default_dtype(dtype), optimizers_in_float32():
                connection.send(("done", job.run(world, telling(connection))))


@contextlib.contextmanager
def optimizers_in_float32() -> Iterator[None]:
    """Let torch's optimizers make their numbers, as NAdam's product, in torch's default dtype whatever the run's is.

    So they do in a user's float64 run, and so do jaxddp's.
    """
    before: list[torch.dtype] = []

    def begin(*_: Any) -> None:
        before.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)

    def end(*_: Any) -> None:
        torch.set_default_dtype(before.pop())

    with hooked(register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)):
        yield


@contextlib.contextmanager
def hooked(*handles: RemovableHandle) -> Iterator[None]:
    """Remove hooks at the end of the `with` statement."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def perturbation(gradient: Tensor, rounding: np.ndarray) -> Tensor:
    """Return a gradient's rounding; where only an excerpt of it is known, its size for each element that is not 0.

    >>> perturbation(torch.tensor([0.0, 2.0, 2.0]), np.array([3.0]))
    tensor([0., 3., 3.])
    """
    given = torch.from_numpy(rounding).to(gradient)
    return given if given.shape == gradient.shape else given.square().mean().sqrt() * (gradient != 0)


def device_of(rank: int, platform: str) -> torch.device:
    """Return the device of a rank; with `platform` "gpu", ranks take the GPUs in turn.

    Raises:
        InputError: there is no GPU.
    """
    if platform == "cpu":
        return CPU
    if not torch.cuda.is_available():
        raise InputError("--torch-platform gpu: torch finds no GPU here; use --torch-platform cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def _rates_ahead(loop: DdpLoop | MultiLossLoop, steps: int) -> Iterator[float]:
    """Yield the learning rates of the steps that would follow, until the schedule ends."""
    loop.optimizer.zero_grad()
    with contextlib.suppress(Exception):  # OneCycleLR raises after its last step, and a port's schedule may too
        for _ in range(steps):
            yield float(loop.optimizer.param_groups[0]["lr"])
            for scheduler in loop.schedulers:
                scheduler.step()
