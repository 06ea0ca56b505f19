"""Log of a run: a progress bar and a line per epoch on the console, and in the run folder

    metrics.jsonl    one JSON line per logged step and per epoch
    tensorboard/     the same metrics for TensorBoard, or elsewhere, see `jaxddp.tracking.writers`
    curves.png       loss and accuracy, drawn at the end

Both trainers use it, so it imports neither jax nor torch.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self, TextIO

from jaxddp.config import TrainerConfig
from jaxddp.errors import InputError, TrainingError, not_installed, tell
from jaxddp.files import check_in_place, sync_open, write_atomically, writing
from jaxddp.program import Program
from jaxddp.tracking.console import Console, formatted
from jaxddp.tracking.curves import Record, draw_curves
from jaxddp.tracking.gradient_metrics import of_gradients, of_step
from jaxddp.tracking.kept_program import keep_flags, keep_program
from jaxddp.tracking.metrics_file import METRICS_FILE, missing_records, open_metrics, read_metrics, to_line
from jaxddp.tracking.run_folder import save_config, save_digests
from jaxddp.tracking.writers import Writer, writers

CURVES_FILE = "curves.png"
MOST_HISTOGRAMS = 250  # of a parameter in a run


def run_title(program: Program, config: TrainerConfig, replicas: int, framework: str, own: Sequence[str] = ()) -> str:
    """Describe a run in one line: program, optimizer, replicas and framework.

    Args:
        program: the program, bound to its options.
        own: names under which the program may have its optimizer for itself.

    >>> from jaxddp.program import Program
    >>> run_title(Program("gpt.py", {}), TrainerConfig(global_batch_size=64), replicas=2, framework="JAX")
    'gpt.py  ·  adam, lr 0.001  ·  2 replicas x 32 examples  ·  JAX'
    """
    share = f"{replicas} replica{'s' * (replicas > 1)} x {config.global_batch_size // replicas} examples"
    optimizers = [name for name in own if program.get(name) is not None]
    rate = f"{config.optimizer}, lr {config.with_scaled_lr(replicas).base_lr:g}"
    title = program.get("title", lambda: Path(program.name).name)()
    if not isinstance(title, str):
        raise InputError(f"{program.name}: title: must return text, and returns {type(title).__name__}")
    return "  ·  ".join([title, optimizers[0] if optimizers else rate, share, framework])


def frozen_notes(names: Iterable[str]) -> list[str]:
    """Return a line that lists the frozen parameters, or no line if there are none.

    >>> frozen_notes(["fc.weight", "fc.bias"])
    ['frozen: fc.bias, fc.weight']
    """
    names = sorted(names)
    return [f"frozen: {', '.join(names)}"] if names else []


def by_split(**splits: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of several splits by one name each.

    >>> by_split(train={"loss": 2.0}, test={"loss": 1.0})
    {'train_loss': 2.0, 'test_loss': 1.0}
    """
    return {f"{split}_{name}": float(value) for split, metrics in splits.items() for name, value in metrics.items()}


class RunLog:
    """Log of a run on the console and in its folder.

    A context manager that draws the curves when the run ends or fails. Steps and epochs are counted from 1.
    Metrics are numbers by name, such as loss and accuracy. The folder gets every epoch, the steps of
    `TrainerConfig.is_logged`, and at most `MOST_HISTOGRAMS` histograms per parameter, so that it stays small.

    Args:
        config: configuration, saved as config.json.
        output: claimed run folder; None: nothing is saved.
        title: first line on the console and heading of the curves; see `run_title`.
        notes: lines below the title.
        examples_per_epoch: sum of `examples` over the steps of an epoch.
        resume_step: step after which the run continues; records of later steps are dropped.
        resume_records: number of records up to that step. A line says if the file has fewer.
        digests: digests of the data, saved as data.json; None: not saved.
        program: the program, whose files are kept next to config.json; None: they are not.
        quiet: print nothing, as on all ranks but one.
        memory: returns the bytes in use on a device, for the progress bar; None if they are unknown.

    Raises:
        InputError: at the start, a file cannot be written, or the metrics of the resumed run cannot be read.
        TrainingError: later, a file cannot be written, or was moved or removed; what was written before stays.

    >>> with RunLog(TrainerConfig(epochs=10), None, title="demo", examples_per_epoch=64) as log:
    ...     log.step(1, 1, {"loss": 2.5, "accuracy": 0.125}, examples=64)
    ...     log.epoch(1, 1, {"loss": 2.5}, {"loss": 2.25}, examples_per_second=12345)
    ...     log.summary({"loss": 2.25, "accuracy": 0.9806}, 11.3, "replicas identical")
    demo
    epoch  1/10  train loss 2.500000  test loss 2.250000   12,345 examples/s
    test accuracy 0.9806   11.3 s   replicas identical
    """

    def __init__(
        self,
        config: TrainerConfig,
        output: Path | None,
        *,
        title: str,
        notes: Sequence[str] = (),
        examples_per_epoch: int,
        resume_step: int | None = None,
        resume_records: int = 0,
        digests: Mapping[str, str] | None = None,
        program: Program | None = None,
        quiet: bool = False,
        memory: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._config = config
        self._output = output
        self._title = title
        self._notes = notes
        self._examples_per_epoch = examples_per_epoch
        self._resume_step, self._resume_records = resume_step, resume_records
        self.records = 0
        """Number of records in metrics.jsonl."""
        self._digests, self._program = digests, program
        self._console = Console(config.epochs, examples_per_epoch, quiet, memory)
        self._steps = config.epochs * math.ceil(examples_per_epoch / config.global_batch_size)
        self._epoch, self._step = 0, resume_step or 0  # the last ones
        self._resources = contextlib.ExitStack()
        self._folder = -1  # descriptor
        self._metrics: TextIO | None = None
        self._writers: list[Writer] = []

    def __enter__(self) -> Self:
        for line in (self._title, *self._notes):
            self._console.print(line)
        if self._output is None:
            return self
        kept = f"; the checkpoint of step {self._resume_step} is kept" if self._resume_step else ""
        with contextlib.ExitStack() as resources, writing(InputError, self._output, kept):
            self._folder = os.open(self._output, os.O_RDONLY)
            resources.callback(os.close, self._folder)
            if self._resume_step is None:  # first, so that a killed run leaves a folder that can be resumed
                self._save_config(self._output)
            self._metrics, history = open_metrics(self._output / METRICS_FILE, self._resume_step)
            resources.enter_context(self._metrics)
            self.records = len(history)
            if missing := missing_records(history, self._resume_records, self._step):
                self.note(f"{self._output / METRICS_FILE}: {missing}")
            for writer in writers(self._config, self._output, self._title, self._resume_step):
                self._writers.append(writer)
                resources.callback(writer.close)
            if self._resume_step is not None:  # last, once the run is certain to continue
                self._save_config(self._output)
            self._resources = resources.pop_all()
        return self

    def _save_config(self, output: Path) -> None:
        if self._program is not None:
            (keep_program if self._resume_step is None else keep_flags)(self._program, output)
        save_config(self._config, output)
        if self._digests is not None:
            save_digests(self._digests, output)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._console.close()
        if self._output is None:
            return
        kept = f"; all other files and the checkpoint of step {self._step} are kept"
        try:
            # After a failure, an error here (a full disk) must not replace the run's error.
            with contextlib.suppress(Exception) if error else contextlib.nullcontext(), self.writing(advice=kept):
                self._resources.close()
                if history := read_metrics(self._output / METRICS_FILE):
                    self._draw(self._output / CURVES_FILE, history)
        finally:
            self._resources.close()

    def _draw(self, path: Path, history: Sequence[Record]) -> None:
        """Draw the curves of the run, or say what is missing for it."""
        try:
            picture = draw_curves(history, self._title)
        except ModuleNotFoundError as error:
            if not (missing := not_installed(error)):
                raise
            tell(f"note: {path} is not drawn: {missing}")
        else:
            write_atomically(path, picture)

    @contextlib.contextmanager
    def writing(self, place: Path | None = None, advice: str = "") -> Iterator[None]:
        """Check that the run folder is in place, and turn an `OSError` of writing there into a `TrainingError`.

        Args:
            place, advice: see `jaxddp.files.writing`.
        """
        with writing(TrainingError, place or self._output, advice):
            if self._output is not None and self._metrics is not None:
                check_in_place(self._output, self._folder)
                check_in_place(self._output / METRICS_FILE, self._metrics.fileno())
            yield

    def waiting(self, what: str, seconds: float) -> None:
        """Print what the run is at, if it has printed nothing for long; see `Console.waiting`."""
        self._console.waiting(what, seconds)

    def note(self, line: str) -> None:
        """Print a line on how the run goes."""
        self._console.print(f"note: {line}")

    def step(self, step: int, epoch: int, metrics: Mapping[str, float], examples: int) -> None:
        """Log an optimizer step on `examples` examples."""
        self._epoch, self._step = epoch, step
        metrics = {name: float(value) for name, value in metrics.items()}
        shown = {name: x for name, x in metrics.items() if not of_gradients(name) and not of_step(name)}
        self._console.advance(step, self._steps, epoch, shown, examples)
        if not self._config.is_logged(step):
            return
        self._keep({"kind": "step", "step": step, "epoch": epoch, "examples": examples, **metrics})
        self._plot(step, {name if of_gradients(name) else f"{name}/step": value for name, value in metrics.items()})

    def epoch(
        self,
        step: int,
        epoch: int,
        train: Mapping[str, float],
        test: Mapping[str, float],
        examples_per_second: float,
        averaged: Mapping[str, float] | None = None,
    ) -> None:
        """Log the end of an epoch; call it before saving the checkpoint of this step.

        Args:
            step: last optimizer step of the epoch.
            epoch: number of the epoch.
            train, test: metrics on the training and the test set.
            examples_per_second: training speed over all replicas.
            averaged: metrics on the test set with the moving average of the parameters.
        """
        splits = {"train": train, "test": test, "averaged": averaged or {}}
        rate = {"examples_per_second": float(examples_per_second)}
        self._log_splits("epoch", step, epoch, splits, rate, f"  {examples_per_second:7,.0f} examples/s")

    def test(
        self, step: int, epoch: int, test: Mapping[str, float], averaged: Mapping[str, float] | None = None
    ) -> None:
        """Log a test after an optimizer step within an epoch; the arguments are those of `epoch`."""
        splits = {"test": test, "averaged": averaged or {}}
        self._log_splits("test", step, epoch, splits, {}, f"  at step {step:,}")

    def _log_splits(
        self,
        kind: str,
        step: int,
        epoch: int,
        splits: Mapping[str, Mapping[str, float]],
        rate: Mapping[str, float],
        end: str,
    ) -> None:
        shown = "  ".join(f"{split} {formatted(metrics)}" for split, metrics in splits.items() if metrics)
        self._console.print(f"{self._console.name(epoch)}  {shown}{end}")
        self._keep({"kind": kind, "step": step, "epoch": epoch, **by_split(**splits), **rate})
        tags = {f"{name}/{split}": float(x) for split, metrics in splits.items() for name, x in metrics.items()}
        self._plot(step, {**tags, **rate})

    def histograms(self, step: int, counts: Mapping[str, Sequence[int]]) -> None:
        """Log histograms of gradient magnitudes in the epoch up to this step, for at most `MOST_HISTOGRAMS` epochs.

        See `jaxddp.tracking.gradient_metrics.histograms`.
        """
        due = self._epoch % math.ceil(self._config.epochs / MOST_HISTOGRAMS) == 0 or self._epoch == self._config.epochs
        for writer in self._writers if due else ():
            with self.writing(writer.path):
                for name, of_name in counts.items():
                    writer.histogram(f"grad_log2/{name}", of_name, step)

    def sync(self) -> None:
        """Write the records so far to the disk, to be called before a checkpoint of their steps is saved."""
        if self._output is not None and self._metrics is not None:
            with self.writing(self._output / METRICS_FILE):
                sync_open(self._metrics.fileno())  # the file is line-buffered

    def summary(
        self, metrics: Mapping[str, float], seconds: float, *notes: str, split: str = "test", speed: Sequence[str] = ()
    ) -> None:
        """Print the last lines: speed; metrics (the loss if there is no other), duration, notes; folder.

        Args:
            split: that of the metrics, "train" in a run without a test set.
        """
        self._console.close()
        metrics = {name: value for name, value in metrics.items() if name != "loss"} or metrics
        shown = [f"{split} {formatted({name: value})}" for name, value in metrics.items()]
        for line in (*speed, "   ".join([*shown, f"{seconds:.1f} s", *notes])):
            self._console.print(line)
        if self._output is not None:
            with self.writing():
                place = f"saved to {self._output}"
            self._console.print(place)

    def _keep(self, record: Record) -> None:
        if self._output is not None and self._metrics is not None:
            with self.writing(self._output / METRICS_FILE):
                self._metrics.write(to_line(record))
            self.records += 1

    def _plot(self, step: int, values: Mapping[str, float]) -> None:
        for writer in self._writers:
            with self.writing(writer.path):
                writer.scalars(values, step)
