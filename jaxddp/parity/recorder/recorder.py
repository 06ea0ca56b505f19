"""The recorder that a training loop of either framework calls."""

import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from jaxddp.errors import InputError
from jaxddp.parity.recorder.batches import Entries
from jaxddp.parity.recorder.files import RecordingWriter, Stages

LIMIT = 2**14  # elements of a tensor that are kept


class Loop(Protocol):
    """One side's view of the loop: what a step computes, seen from outside."""

    rank: int

    def header(self) -> dict[str, Any]:
        """Describe the run for the first line of the recording."""

    def arm(self, values: dict[str, Any]) -> None:
        """Prepare for the next step, which is recorded; `values` are those of the step before it."""

    def take(self, batches: list[Entries], losses: list[Any], values: dict[str, Any]) -> tuple[Stages, dict[str, Any]]:
        """Return stages and notes of the step that has just been taken, and stop watching."""

    def entries(self, batch: Any) -> Entries:
        """Return the arrays of a batch that this process has."""


class Recorder:
    """Recorder of a training loop in torch or JAX, which stays as it is.

    Nothing of the loop changes, and steps that are not recorded cost a counter. In torch:

        recorder = Recorder("torch_run")
        recorder.watch(model, optimizer)  # model: with DistributedDataParallel or without
        for batch in loader:
            ...
            optimizer.step()
            recorder.step(batch, loss)

    In JAX, with any trees of arrays (Optax, linen, Haiku, Equinox):

        recorder = Recorder("jax_run")
        recorder.watch(params)
        for batch in loader:
            ...
            recorder.step(batch, loss, grads=grads, updates=updates, params=params, opt_state=opt_state, lr=lr)

    `watch(state)` and `step(..., state=state)` take a `TrainState`; `watch(model, optimizer)` takes an nnx module and
    its `nnx.Optimizer`, which `step` then reads itself. `python -m jaxddp.parity compare torch_run jax_run` compares.

    Args:
        folder: folder of the recording, which every process names; several machines may each have their own, whose
            `rank` folders belong into one.
        steps: number of steps to record, from the first; or the numbers of the steps, counted from 1. Updates are
            explained only by steps from the first on without a gap.
        limit: largest number of elements that are kept of a tensor; of a larger one, an excerpt and its norm are.
        overwrite: replace a recording that the folder has.

    Raises:
        InputError: a step is not a positive integer.

    >>> import tempfile, torch
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     recorder = Recorder(folder, steps=2)
    ...     recorder.watch(model, optimizer)
    ...     for _ in range(5):
    ...         x = torch.ones(4, 3)
    ...         loss = model(x).square().mean()
    ...         optimizer.zero_grad()
    ...         loss.backward()
    ...         optimizer.step()
    ...         recorder.step({"x": x}, loss)
    ...     sorted(path.name for path in Path(folder, "rank0").iterdir())
    ['000001.safetensors', '000002.safetensors', 'run.jsonl']
    """

    def __init__(
        self,
        folder: str | Path,
        steps: int | Iterable[int] = 10,
        *,
        limit: int = LIMIT,
        overwrite: bool = False,
    ):
        self._folder, self._limit, self._overwrite = Path(folder), limit, overwrite
        self._left = _numbers(steps)
        if limit < 1:
            raise InputError(f"Recorder: limit {limit}: must be at least 1")
        self._count = 0  # steps taken
        self._loop: Loop | None = None
        self._writer: RecordingWriter | None = None
        self._batches: list[Entries] = []
        self._losses: list[Any] = []
        self._next = self._left.pop() if self._left else 0

    @property
    def due(self) -> bool:
        """Whether the step that comes next is recorded; a loop may then ask its step for gradients."""
        return self._next == self._count + 1

    def watch(self, model: Any, optimizer: Any = None, **options: Any) -> None:
        """Say what trains, before the first step.

        Args:
            model: torch: the module. JAX: the parameters, variables (`{"params": ...}`), a state with `params`, or an
                nnx module.
            optimizer: torch: the optimizer. JAX: an `nnx.Optimizer`, or none.
            options: torch: `scaler`, the `GradScaler` whose scale the gradients have. JAX: `stacked=True` if every
                array has a leading axis of replicas, as under `jax.pmap`.

        Raises:
            InputError: the folder has a recording, or an argument is of another kind.
        """
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(model, torch.nn.Module):
            from jaxddp.parity.recorder.torch_loop import TorchLoop

            self._loop = TorchLoop(model, optimizer, self._limit, **options)
        else:
            from jaxddp.parity.recorder.jax_loop import JaxLoop

            self._loop = JaxLoop(model, optimizer, self._limit, **options)
        self._writer = RecordingWriter(self._folder, self._loop.rank, self._overwrite)
        self._writer.begin({**self._loop.header(), "limit": self._limit})
        if self.due:
            self._loop.arm({"params": model})

    def micro_batch(self, batch: Any, loss: Any) -> None:
        """Note a micro-batch of a step that accumulates gradients; `step` gets the last one.

        Args:
            batch, loss: see `step`.
        """
        if self.due:
            assert self._loop is not None, "watch comes first"
            self._batches.append(self._loop.entries(batch))
            self._losses.append(loss)

    def step(self, batch: Any, loss: Any, **values: Any) -> None:
        """Note that a step has been taken, after the optimizer's update.

        Args:
            batch: this process's examples: an array, or any nesting of mappings and sequences of arrays with one row
                per example; an entry "ids" alone identifies them.
            loss: this process's loss, a scalar; JAX under `stacked`: one per replica.
            values: JAX: `grads`, what the optimizer got, and if the loop has them `local_grads`, before the mean over
                the replicas, `clipped_grads`, `updates`, `params`, `buffers` or `batch_stats`, and `opt_state`, all
                after the step; `state` for the last of these together; `lr`, the learning rate. Trees of arrays.

        Raises:
            InputError: `watch` was not called, or a tree has other arrays than the parameters.
        """
        if self._loop is None or self._writer is None:
            raise InputError("Recorder: step was called before watch")
        if self.due:
            batches = [*self._batches, self._loop.entries(batch)]
            stages, notes = self._loop.take(batches, [*self._losses, loss], values)
            self._writer.write(self._count + 1, stages, notes)
            self._batches, self._losses = [], []
            self._next = self._left.pop() if self._left else 0
        self._count += 1
        if self.due:
            self._loop.arm(values)


def _numbers(steps: int | Iterable[int]) -> list[int]:
    """Return the numbers of the steps to record, the first of them last."""
    numbers = [*range(1, steps + 1)] if isinstance(steps, int) else [*steps]
    increasing = all(one < other for one, other in pairwise(numbers))
    if not numbers or not all(isinstance(n, int) for n in numbers) or numbers[0] < 1 or not increasing:
        raise InputError(f"Recorder: steps {steps!r}: must be a number above 0, or increasing numbers of steps from 1")
    return numbers[::-1]
