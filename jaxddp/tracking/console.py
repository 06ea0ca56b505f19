"""Console of a run: lines, and a progress bar below them on terminals."""

import contextlib
import time
from collections.abc import Callable, Mapping

from tqdm import tqdm

from jaxddp.errors import on_one_line
from jaxddp.tracking.throughput import gigabytes

SILENCE = 30.0  # seconds without a line, where there is no bar
FORMATS = {"loss": "8.6f", "accuracy": ".4f"}  # other metrics: four digits


class Console:
    """Lines on stdout and a progress bar with rate, remaining time and memory, if stderr is a terminal, or a line of
    progress after `SILENCE` seconds without one.

    Args:
        epochs: number of epochs.
        examples_per_epoch: examples of an epoch.
        quiet: print nothing.
        memory: returns the bytes in use on a device, None if they are unknown.
        clock: time in seconds.
    """

    def __init__(
        self,
        epochs: int,
        examples_per_epoch: int,
        quiet: bool,
        memory: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._epochs, self._examples_per_epoch, self._quiet, self._memory = epochs, examples_per_epoch, quiet, memory
        self._clock, self._printed = clock, clock()
        self._bar: tqdm | None = None
        self._first: tuple[float, int] | None = None  # time and number of the first step

    def print(self, line: str) -> None:
        """Print a line, above the bar."""
        if self._quiet:
            return
        self._printed = self._clock()
        with tqdm.external_write_mode() if self._bar is not None else contextlib.nullcontext():
            print(f"{on_one_line(line)}\n", end="", flush=True)  # one write, as another thread may print

    def name(self, epoch: int) -> str:
        """Return the name of an epoch, all equally long."""
        epochs = str(self._epochs)
        return f"epoch {epoch:>{len(epochs)}}/{epochs}"

    def advance(self, step: int, steps: int, epoch: int, metrics: Mapping[str, float], examples: int) -> None:
        """Advance the bar by the examples of a step, one of so many steps of the run."""
        state = on_one_line(f"{self.name(epoch)}  {formatted(metrics)}")
        if self._bar is None:
            self._bar = tqdm(
                desc=state,
                total=self._epochs * self._examples_per_epoch,
                initial=(epoch - 1) * self._examples_per_epoch,
                disable=True if self._quiet else None,  # None: shown on terminals only
                leave=False,
                unit=" examples",
                unit_scale=True,
                bar_format="{desc} |{bar:24}| {remaining} left, {rate_noinv_fmt}{postfix}",
            )
        if not self._bar.disable:
            self._bar.set_description_str(state, refresh=False)
            if (used := self._memory()) is not None:
                self._bar.set_postfix_str(gigabytes(used), refresh=False)
            self._bar.update(examples)
        elif self._is_silent:
            since, first = self._first or (self._clock(), step)
            left = tqdm.format_interval((self._clock() - since) / max(1, step - first) * max(0, steps - step))
            self.print(f"{state}  step {step:,} of {steps:,}  {left} left")
        self._first = self._first or (self._clock(), step)

    def waiting(self, what: str, seconds: float) -> None:
        """Print what a run without a bar is at, for so long already, if no line came; another thread calls it often."""
        if self._is_silent and (self._bar is None or self._bar.disable):
            self.print(f"{what}: {seconds:.0f} s so far")

    @property
    def _is_silent(self) -> bool:
        return not self._quiet and self._clock() - self._printed >= SILENCE

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def formatted(metrics: Mapping[str, float]) -> str:
    """Write metrics in a line.

    >>> formatted({"loss": 0.5, "f1": 0.25})
    'loss 0.500000  f1 0.25'
    """
    return "  ".join(f"{name} {value:{FORMATS.get(name.rpartition('_')[2], '.4g')}}" for name, value in metrics.items())
