"""The recorder that a training loop of either framework calls."""

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxddp.errors import InputError, described, shortened, tell
from jaxddp.files import writing
from jaxddp.parity.recorder.batches import Entries
from jaxddp.parity.recorder.files import RecordingWriter

if TYPE_CHECKING:
    from jaxddp.parity.recorder.jax_loop import JaxLoop
    from jaxddp.parity.recorder.torch_loop import TorchLoop

    Loop = TorchLoop | JaxLoop  # one side's view of the loop: what a step computes, seen from outside

LIMIT = 2**14  # elements of a tensor that are kept


class Recorder:
    """Recorder of a training loop in torch or JAX, which stays as it is.

    Nothing of the loop changes, and steps that are not recorded cost a counter. Wrong arguments raise `InputError` in
    the constructor, in `watch` and in the first call of `step`. Whatever fails later, such as writing to a full disk,
    ends the recording with a line on stderr, and never the training. In torch:

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
    its `nnx.Optimizer`, which `step` then reads itself. `jaxddp compare torch_run jax_run` compares.

    Args:
        folder: folder of the recording, which every process names; several machines may each have their own, whose
            `rank` folders belong into one.
        steps: number of steps to record, from the first; or the numbers of the steps, counted from 1. Updates are
            explained only by steps from the first on without a gap.
        limit: largest number of elements that are kept of a tensor; of a larger one an excerpt, and more of the whole.
        overwrite: replace a recording that the folder has.

    Raises:
        InputError: an argument is wrong.

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
        self, folder: str | Path, steps: int | Iterable[int] = 10, *, limit: int = LIMIT, overwrite: bool = False
    ):
        if not isinstance(folder, str | Path):
            raise InputError(f"Recorder: folder {shortened(repr(folder))}: must be a path")
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise InputError(f"Recorder: limit {shortened(repr(limit))}: must be an integer, at least 1")
        self._folder, self._limit, self._overwrite = Path(folder), limit, overwrite
        self._left = _numbers(steps)
        self._count = 0  # steps taken
        self._loop: Loop | None = None
        self._writer: RecordingWriter | None = None
        self._batches: list[Entries] = []
        self._losses: list[Any] = []
        self._next, self._last = next(self._left, 0), 0  # step to record, and the last one that is

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
            InputError: the folder has a recording or cannot be written, or an argument is of another kind.
        """
        if self._loop is not None:
            raise InputError("Recorder: watch was called before; each model needs its own recorder")
        try:
            loop = self._loop_of(model, optimizer, options)
            header = {**loop.header(), "limit": self._limit}
            with writing(InputError, self._folder):
                self._writer = RecordingWriter(self._folder, loop.rank, self._overwrite)
                if self.due:
                    loop.arm({"params": model})
                self._writer.begin(header)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"Recorder.watch: {_described(error)}") from error
        self._loop = loop

    def _loop_of(self, model: Any, optimizer: Any, options: dict[str, Any]) -> "Loop":
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(model, torch.nn.Module):
            from jaxddp.parity.recorder.torch_loop import TorchLoop

            return TorchLoop(model, optimizer, self._limit, **options)
        from jaxddp.parity.recorder.jax_loop import JaxLoop

        return JaxLoop(model, optimizer, self._limit, **options)

    def micro_batch(self, batch: Any, loss: Any) -> None:
        """Note a micro-batch of a step that accumulates gradients; `step` gets the last one.

        Args:
            batch, loss: see `step`.

        Raises:
            InputError: `watch` was not called.
        """
        loop = self._watched
        if self.due:
            with self._training_goes_on(loop):
                self._batches.append(loop.entries(batch))
                self._losses.append(loss)

    def step(self, batch: Any, loss: Any, **values: Any) -> None:
        """Note that a step has been taken, after the optimizer's update.

        Args:
            batch: this process's examples: an array, or any nesting of mappings and sequences of arrays with one row
                per example; if an entry "ids" has an integer for each, only this entry identifies them.
            loss: this process's loss, a scalar; JAX under `stacked`: one per replica.
            values: JAX: `grads`, what the optimizer got, and if the loop has them `local_grads`, before the mean over
                the replicas, `clipped_grads`, `updates`, `params`, `buffers` or `batch_stats`, and `opt_state`, all
                after the step; `state` for the last of these together; `lr`, the learning rate. Trees of arrays.

        Raises:
            InputError: `watch` was not called; in the first call: a value is unknown, or a tree has other arrays than
                the parameters.
        """
        loop = self._watched
        if self.due or not self._count:
            with self._training_goes_on(loop):
                loop.check(values)
                if self.due:
                    self._record(loop, batch, loss, values)
        self._count += 1
        if self.due:
            with self._training_goes_on(loop):
                loop.arm(values)

    @property
    def _watched(self) -> "Loop":
        if self._loop is None:
            raise InputError("Recorder: step or micro_batch was called before watch")
        return self._loop

    def _record(self, loop: "Loop", batch: Any, loss: Any, values: dict[str, Any]) -> None:
        assert self._writer is not None, "watch makes it"
        batches = [*self._batches, loop.entries(batch)]
        stages, notes = loop.take(batches, [*self._losses, loss], values)
        self._writer.write(self._next, stages, notes)
        self._batches, self._losses = [], []
        self._next, self._last = next(self._left, 0), self._next

    @contextlib.contextmanager
    def _training_goes_on(self, loop: "Loop") -> Iterator[None]:
        """Stop the recording at an error, and say so; only a wrong argument of the first step is raised."""
        try:
            yield
        except Exception as error:
            if isinstance(error, InputError) and not self._count:
                raise
            whole = f"steps up to {self._last} are whole" if self._last else "no step is recorded"
            says = f"{self._folder}: recording stops at step {self._next}: {_described(error)}; {whole}"
            self._next, self._batches, self._losses = 0, [], []
            loop.stop()
            tell(says)


def _described(error: Exception) -> str:
    """Return an error in one line, or of one of the operating system what it says of a file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'a file'}: {error.strerror.lower()}"
    return str(error) if isinstance(error, InputError) else described(error, 150)


def _numbers(steps: int | Iterable[int]) -> Iterator[int]:
    """Return the numbers of the steps to record."""
    numbers: Sequence[int] = ()
    if isinstance(steps, int):
        numbers = range(1, 1 if steps is True else steps + 1)
    else:
        with contextlib.suppress(TypeError):
            numbers = [index(n) for n in steps]
    is_increasing = isinstance(numbers, range) or all(one < other for one, other in pairwise(numbers))
    if not numbers or numbers[0] < 1 or not is_increasing:
        says = "must be a number above 0, or increasing numbers of steps from 1"
        raise InputError(f"Recorder: steps {shortened(repr(steps))}: {says}")
    return iter(numbers)
