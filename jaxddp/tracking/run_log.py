"""Log of a run: a progress bar and a line per epoch on the console, and in the run folder

    metrics.jsonl    one JSON line per logged step and per epoch
    tensorboard/     the same metrics for TensorBoard
    curves.png       loss and accuracy, drawn at the end

Both trainers use it, so it imports neither jax nor torch.
"""

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from tqdm import tqdm

from jaxddp.config import TrainConfig
from jaxddp.errors import InputError, TrainingError
from jaxddp.files import check_in_place, sync_open, write_atomically, writing
from jaxddp.tracking.curves import Record, draw_curves
from jaxddp.tracking.gradient_metrics import of_gradients
from jaxddp.tracking.metrics_file import METRICS_FILE, missing_records, open_metrics, read_metrics, to_line
from jaxddp.tracking.run_folder import save_config, save_digests
from jaxddp.tracking.tensorboard import EventFile

TENSORBOARD_FOLDER = "tensorboard"
CURVES_FILE = "curves.png"
MOST_STEPS = 5000  # logged in a run without --log-every; TensorBoard shows 1,000
MOST_HISTOGRAMS = 250  # of a parameter in a run
FORMATS = {"loss": "8.6f", "accuracy": ".4f"}  # other metrics: four digits


def run_title(config: TrainConfig, replicas: int, framework: str) -> str:
    """Describe a run in one line: model, data, optimizer, replicas and framework.

    >>> run_title(TrainConfig(global_batch_size=64), replicas=2, framework="JAX")
    'mlp on digits  ·  adam, lr 0.001  ·  2 replicas x 32 examples  ·  JAX'
    """
    data = config.dataset if config.data_path is None else Path(config.data_path).name
    data = data.encode(errors="replace").decode()  # a name that is not UTF-8 can neither be printed nor drawn
    share = f"{replicas} replica{'s' * (replicas > 1)} x {config.global_batch_size // replicas} examples"
    return "  ·  ".join(
        [
            f"{config.model} on {data}",
            f"{config.optimizer}, lr {config.with_scaled_lr(replicas).base_lr:g}",
            share,
            framework,
        ]
    )


def frozen_notes(names: Iterable[str]) -> list[str]:
    """Return a line that lists the frozen parameters, or no line if there are none.

    >>> frozen_notes(["fc.weight", "fc.bias"])
    ['frozen: fc.bias, fc.weight']
    """
    names = sorted(names)
    return [f"frozen: {', '.join(names)}"] if names else []


class RunLog:
    """Log of a run on the console and in its folder.

    A context manager that draws the curves when the run ends or fails. Steps and epochs are counted from 1.
    Metrics are numbers by name, such as loss and accuracy. The folder gets every epoch, every `log_every`-th step, or
    at most `MOST_STEPS` steps, and at most `MOST_HISTOGRAMS` histograms per parameter, so that it stays small.

    Args:
        config: configuration, saved as config.json.
        output: claimed run folder; None: nothing is saved.
        title: first line on the console and heading of the curves; see `run_title`.
        notes: lines below the title.
        examples_per_epoch: sum of `examples` over the steps of an epoch.
        resume_step: step after which the run continues; records of later steps are dropped.
        resume_records: number of records up to that step. A line says if the file has fewer.
        digests: digests of the data, saved as data.json; None: not saved.
        quiet: print nothing, as on all ranks but one.

    Raises:
        InputError: at the start, a file cannot be written, or the metrics of the resumed run cannot be read.
        TrainingError: later, a file cannot be written, or was moved or removed; what was written before stays.

    >>> with RunLog(TrainConfig(epochs=10), None, title="demo", examples_per_epoch=64) as log:
    ...     log.step(1, 1, {"loss": 2.5, "accuracy": 0.125}, examples=64)
    ...     log.epoch(1, 1, {"loss": 2.5}, {"loss": 2.25}, examples_per_second=12345)
    ...     log.summary(0.9806, 11.3, "replicas identical")
    demo
    epoch  1/10  train loss 2.500000  test loss 2.250000   12,345 examples/s
    test accuracy 0.9806   11.3 s   replicas identical
    """

    def __init__(
        self,
        config: TrainConfig,
        output: Path | None,
        *,
        title: str,
        notes: Sequence[str] = (),
        examples_per_epoch: int,
        resume_step: int | None = None,
        resume_records: int = 0,
        digests: Mapping[str, str] | None = None,
        quiet: bool = False,
    ) -> None:
        self._config = config
        self._output = output
        self._title = title
        self._notes = notes
        self._examples_per_epoch = examples_per_epoch
        self._resume_step, self._resume_records = resume_step, resume_records
        self.records = 0
        """Number of records in metrics.jsonl."""
        self._digests = digests
        self._quiet = quiet
        steps = config.epochs * math.ceil(examples_per_epoch / config.global_batch_size)
        self._log_every = config.log_every or max(1, math.ceil(steps / MOST_STEPS))
        self._epoch, self._step = 0, resume_step or 0  # the last ones
        self._resources = contextlib.ExitStack()
        self._bar: tqdm | None = None
        self._folder = -1  # descriptor
        self._metrics: TextIO | None = None
        self._board: EventFile | None = None

    def __enter__(self) -> Self:
        for line in (self._title, *self._notes):
            self._print(line)
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
                self._print(f"note: {self._output / METRICS_FILE}: {missing}")
            self._board = EventFile(self._output / TENSORBOARD_FOLDER, self._resume_step)
            resources.callback(self._board.close)
            if self._resume_step is not None:  # last, once the run is certain to continue
                self._save_config(self._output)
            self._resources = resources.pop_all()
        return self

    def _save_config(self, output: Path) -> None:
        save_config(self._config, output)
        if self._digests is not None:
            save_digests(self._digests, output)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_bar()
        if self._output is None:
            return
        kept = f"; all other files and the checkpoint of step {self._step} are kept"
        try:
            # After a failure, an error here (a full disk) must not replace the run's error.
            with contextlib.suppress(Exception) if error else contextlib.nullcontext(), self.writing(advice=kept):
                self._resources.close()
                self._draw_curves(self._output)
        finally:
            self._resources.close()

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

    def step(self, step: int, epoch: int, metrics: Mapping[str, float], examples: int) -> None:
        """Log an optimizer step on `examples` examples."""
        self._epoch, self._step = epoch, step
        metrics = {name: float(value) for name, value in metrics.items()}
        self._advance_bar(epoch, {name: x for name, x in metrics.items() if not of_gradients(name)}, examples)
        if step % self._log_every:
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
        splits = {"train": train, "test": test} | ({} if averaged is None else {"averaged": averaged})
        values = {(split, name): float(value) for split in splits for name, value in splits[split].items()}
        rate = {"examples_per_second": float(examples_per_second)}
        shown = "  ".join(f"{split} {_format(metrics)}" for split, metrics in splits.items() if metrics)
        self._print(f"{self._epoch_name(epoch)}  {shown}  {examples_per_second:7,.0f} examples/s")
        flat = {f"{split}_{name}": value for (split, name), value in values.items()}
        self._keep({"kind": "epoch", "step": step, "epoch": epoch, **flat, **rate})
        self._plot(step, {f"{name}/{split}": value for (split, name), value in values.items()} | rate)

    def histograms(self, step: int, counts: Mapping[str, Sequence[int]]) -> None:
        """Log histograms of gradient magnitudes in the epoch up to this step, for at most `MOST_HISTOGRAMS` epochs.

        See `jaxddp.tracking.gradient_metrics.histograms`.
        """
        due = self._epoch % math.ceil(self._config.epochs / MOST_HISTOGRAMS) == 0 or self._epoch == self._config.epochs
        if self._board is not None and due:
            with self.writing(self._board.path):
                for name, of_name in counts.items():
                    self._board.histogram(f"grad_log2/{name}", of_name, step)

    def sync(self) -> None:
        """Write the records so far to the disk, to be called before a checkpoint of their steps is saved."""
        if self._output is not None and self._metrics is not None:
            with self.writing(self._output / METRICS_FILE):
                sync_open(self._metrics.fileno())  # the file is line-buffered

    def summary(self, test_accuracy: float, seconds: float, *notes: str) -> None:
        """Print the last lines: test accuracy, duration, notes, and the run folder."""
        self._close_bar()
        self._print("   ".join([f"test accuracy {test_accuracy:.4f}", f"{seconds:.1f} s", *notes]))
        if self._output is not None:
            with self.writing():
                place = f"saved to {self._output}"
            self._print(place)

    def _print(self, line: str) -> None:
        if self._quiet:
            return
        with tqdm.external_write_mode() if self._bar is not None else contextlib.nullcontext():  # prints above the bar
            print(line, flush=True)

    def _epoch_name(self, epoch: int) -> str:
        epochs = str(self._config.epochs)
        return f"epoch {epoch:>{len(epochs)}}/{epochs}"

    def _advance_bar(self, epoch: int, metrics: Mapping[str, float], examples: int) -> None:
        state = f"{self._epoch_name(epoch)}  {_format(metrics)}"
        if self._bar is None:
            self._bar = tqdm(
                desc=state,
                total=self._config.epochs * self._examples_per_epoch,
                initial=(epoch - 1) * self._examples_per_epoch,
                disable=True if self._quiet else None,  # None: shown on terminals only
                leave=False,
                unit=" examples",
                unit_scale=True,
                bar_format="{desc} |{bar:24}| {remaining} left, {rate_noinv_fmt}",
            )
        if not self._bar.disable:
            self._bar.set_description_str(state, refresh=False)
            self._bar.update(examples)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _keep(self, record: Record) -> None:
        if self._output is not None and self._metrics is not None:
            with self.writing(self._output / METRICS_FILE):
                self._metrics.write(to_line(record))
            self.records += 1

    def _plot(self, step: int, values: Mapping[str, float]) -> None:
        if self._board is not None:
            with self.writing(self._board.path):
                self._board.scalars(values, step)

    def _draw_curves(self, output: Path) -> None:
        if history := read_metrics(output / METRICS_FILE):
            write_atomically(output / CURVES_FILE, draw_curves(history, self._title))


def _format(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:{FORMATS.get(name, '.4g')}}" for name, value in metrics.items())
