"""What a run shows (a progress bar, a line per epoch) and what it keeps of it in its folder:

    metrics.jsonl    a JSON line per step and per epoch
    tensorboard/     the same for TensorBoard
    curves.png       loss and accuracy, drawn at the end

Both trainers use it, so it knows neither jax nor torch.
"""

import contextlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from tqdm import tqdm

from jaxddp.config import TrainConfig
from jaxddp.errors import InputError
from jaxddp.files import write_atomically
from jaxddp.tracking.curves import Record, draw_curves
from jaxddp.tracking.gradient_metrics import of_gradients
from jaxddp.tracking.run_folder import save_config
from jaxddp.tracking.tensorboard import open_tensorboard, write_histogram

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
CURVES_FILE = "curves.png"
KINDS = ("step", "epoch")
FORMATS = {"loss": "8.6f", "accuracy": ".4f"}  # of other metrics: four digits


def run_title(config: TrainConfig, replicas: int, framework: str) -> str:
    """What is run, in one line.

    >>> run_title(TrainConfig(global_batch_size=64), replicas=2, framework="JAX")
    'mlp on digits  ·  adam, lr 0.001  ·  2 replicas x 32 examples  ·  JAX'
    """
    data = config.dataset if config.data_path is None else Path(config.data_path).name
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
    """What is said of the parameters that do not learn; nothing where there is none.

    >>> frozen_notes(["fc.weight", "fc.bias"])
    ['frozen: fc.bias, fc.weight']
    """
    names = sorted(names)
    return [f"frozen: {', '.join(names)}"] if names else []


class RunLog:
    """A run's display and its folder; a context manager that draws the curves when it ends, or fails.

    Steps and epochs are counted from 1. Metrics are numbers by name, such as loss and accuracy.

    Args:
        config: kept as config.json.
        output: a claimed run folder, or None to keep nothing.
        title: what is run, the first line and above the curves; see `run_title`.
        notes: lines below the title.
        examples_per_epoch: sum of an epoch's `examples`.
        resume_step: continue after this step; what the folder has of later ones is dropped.
        quiet: show nothing, as on all ranks but one.

    Raises:
        InputError: the metrics of the resumed run cannot be read.

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
        quiet: bool = False,
    ) -> None:
        self._config = config
        self._output = output
        self._title = title
        self._notes = notes
        self._examples_per_epoch = examples_per_epoch
        self._resume_step = resume_step
        self._quiet = quiet
        self._resources = contextlib.ExitStack()
        self._bar: tqdm | None = None
        self._metrics: TextIO | None = None
        self._board: Any = None

    def __enter__(self) -> Self:
        for line in (self._title, *self._notes):
            self._print(line)
        if self._output is None:
            return self
        with contextlib.ExitStack() as resources:
            if self._resume_step is None:  # first of all, so that whatever is there later belongs to a run
                save_config(self._config, self._output)
            self._metrics = resources.enter_context(_open_metrics(self._output / METRICS_FILE, self._resume_step))
            self._board = open_tensorboard(self._output / TENSORBOARD_FOLDER, self._resume_step)
            resources.callback(self._board.close)
            if self._resume_step is not None:  # only now is it certain that it can go on
                save_config(self._config, self._output)
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_bar()
        # When the run has failed, a full disk here must not hide why.
        with contextlib.suppress(Exception) if error else contextlib.nullcontext():
            self._resources.close()
            self._draw_curves()

    def step(self, step: int, epoch: int, metrics: Mapping[str, float], examples: int) -> None:
        """An optimizer step on so many examples has been made."""
        metrics = {name: float(value) for name, value in metrics.items()}
        self._advance_bar(epoch, {name: x for name, x in metrics.items() if not of_gradients(name)}, examples)
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
        """An epoch has ended with this step; call it before a checkpoint of that step is saved.

        Args:
            averaged: on the test set too, with the moving average of the parameters.
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
        """Write histograms of gradient magnitudes up to this step (`jaxddp.tracking.gradient_metrics.histograms`)."""
        if self._board is not None:
            for name, of_name in counts.items():
                write_histogram(self._board, f"grad_log2/{name}", of_name, step)

    def summary(self, test_accuracy: float, seconds: float, *notes: str) -> None:
        """The last lines: how good, how long, what else there is to say, and where it is kept."""
        self._close_bar()
        self._print("   ".join([f"test accuracy {test_accuracy:.4f}", f"{seconds:.1f} s", *notes]))
        if self._output is not None:
            self._print(f"kept in {self._output}")

    def _print(self, line: str) -> None:
        if self._quiet:
            return
        with tqdm.external_write_mode() if self._bar is not None else contextlib.nullcontext():  # above the bar
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
        if self._metrics is not None:
            self._metrics.write(_to_line(record))

    def _plot(self, step: int, values: Mapping[str, float]) -> None:
        if self._board is not None:
            for tag, value in values.items():
                self._board.add_scalar(tag, value, step)

    def _draw_curves(self) -> None:
        if self._output is not None and (history := read_metrics(self._output / METRICS_FILE)):
            write_atomically(self._output / CURVES_FILE, draw_curves(history, self._title))


def read_metrics(path: Path) -> list[Record]:
    """The records of a metrics.jsonl; a last line that a killed process left torn is dropped.

    Raises:
        InputError: another line is not a record, or the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    records = [_from_line(line) for line in lines]
    if records and records[-1] is None:
        records.pop()
    if None in records:
        raise InputError(f"{path}: line {records.index(None) + 1} is not a record of a run; remove it")
    return [record for record in records if record is not None]


def check_same_epochs(folder: Path, steps_per_epoch: int) -> None:
    """Refuse to resume a run whose place in the data the number of its steps no longer tells.

    Raises:
        InputError: the run's epochs had more or fewer steps.
    """
    path = folder / METRICS_FILE
    epochs = [record for record in read_metrics(path) if record["kind"] == "epoch"] if path.exists() else []
    if epochs and epochs[-1]["step"] != epochs[-1]["epoch"] * steps_per_epoch:
        before = epochs[-1]["step"] // epochs[-1]["epoch"]
        raise InputError(
            f"--resume {folder}: an epoch had {before} steps and would now have {steps_per_epoch}; go on with the data "
            "and the --devices that it had"
        )


def _to_line(record: Record) -> str:
    """JSON has no NaN and no infinity: they become null."""
    lost = {name: None for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    return json.dumps(record | lost) + "\n"


def _from_line(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or record.get("kind") not in KINDS:
        return None
    if not all(isinstance(record.get(name), int) for name in ("step", "epoch")):
        return None
    numbers = (value for name, value in record.items() if name != "kind" and value is not None)
    return record if all(isinstance(value, int | float) for value in numbers) else None


def _open_metrics(path: Path, resume_step: int | None) -> TextIO:
    """Open to append, having dropped the records after `resume_step`."""
    history = read_metrics(path) if resume_step is not None and path.exists() else []
    kept = [record for record in history if record["step"] <= (resume_step or 0)]
    write_atomically(path, "".join(map(_to_line, kept)).encode())
    return path.open("a", encoding="utf-8", buffering=1)  # each line is written at once, so none is lost


def _format(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:{FORMATS.get(name, '.4g')}}" for name, value in metrics.items())
