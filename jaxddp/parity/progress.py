"""Show the progress of a check: its stage, how far it is and how long it may take, on one line that is rewritten."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TextIO

from tqdm import tqdm

from jaxddp.errors import on_one_line, repeating
from jaxddp.parity.stopping import Stop

DRAW = "drawing torch's weights"
FREE, FORCED = "float64, each side by itself", "float64, stage by stage"
FLOAT32 = "float32"
COMPARE, CAUSES, PATCHES = "comparison of the records", "causes of differences", "patches"
RATES, INITIAL, EVALUATION = "rates to the end of the schedule", "initialisation", "evaluation"
BEYOND, WITHOUT_EFFECT, KEYS = "comparison beyond the run", "operations without effect", "random keys"
RUNS = (FREE, FORCED, FLOAT32)
WIDTH = 80  # columns of a terminal that does not say how many it has
EVERY = {True: 0.5, False: 30.0}  # seconds between two texts: rewritten, and line by line


class Worker(Protocol):
    """A process at work: see `jaxddp.parity.processes.Child`."""

    name: str
    where: str
    heard: float
    reply: Any

    @property
    def failure(self) -> Any:
        """See `jaxddp.parity.processes.Child`."""


class Progress:
    """Progress of one check.

    Args:
        steps: number of steps of each run.
        stages: stages of the check, in their order.
        stop: request to end early.
        tell: is called with each line, from a thread; None: prints on stderr.
        stream: is written to, if `tell` is None; a terminal or notebook gets one line that is rewritten.
        clock: seconds.

    Attributes:
        seconds: duration of each stage that is done; a stage within another counts in both.
    """

    def __init__(
        self,
        steps: int = 0,
        stages: Sequence[str] = (),
        stop: Stop | None = None,
        tell: Callable[[str], None] | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.stop = stop or Stop()
        self._steps, self._left, self._clock = steps, [*stages], clock
        self._stream = stream or sys.stderr
        self._tell = tell or (lambda line: print(line, file=self._stream, flush=True))
        self._rewrites = tell is None and _can_rewrite(self._stream)
        self._lock, self._line = threading.Lock(), None if not self._rewrites else _line(self._stream)
        self._stage, self._what, self._where, self._records = "", "", "", dict[str, Sized]()
        self._counts: dict[str, int] = {}
        self._said = set[str]()  # errors
        self._began, self._first, self._took = 0.0, (0.0, 0), 0.0
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, what: str = "", **records: Sized) -> Iterator[None]:
        """Begin a stage, which is done once the body of the `with` statement is.

        Args:
            name: name of the stage.
            what: what is done, if it takes no steps.
            records: side -> records; each step adds one.
        """
        self._counts, self._first, self._where = {}, (0.0, 0), ""
        self._stage, self._what, self._records, self._began = name, what, records, self._clock()
        began = self._began
        yield
        self._took = max(self._took, self._clock() - self._began)
        self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - began
        self._left = [stage for stage in self._left if stage != name]
        self._stage = ""

    def watch(self, workers: Sequence[Worker]) -> None:
        """Note how far processes at work are, and say which side has failed; raise `Stopped` if the check is to end."""
        at_work = {worker.name.partition(" ")[0] for worker in workers if worker.reply is None}
        for worker in workers if self._stage in (DRAW, *RUNS) else ():
            others = at_work - {worker.name.partition(" ")[0]}
            error = worker.failure
            if others and error is not None and not error.of_file and error.what not in self._said:
                # Without torch's weights nothing runs.
                ends = self._stage == DRAW and worker.name.startswith("torch")
                self.say(str(error) if ends else f"{error}; {others.pop()} continues")
                self._said.add(error.what)
        if self._records:
            self._counts = {side: len(of_side) for side, of_side in self._records.items()}
            if not self._first[1] and min(self._counts.values()):  # each side has compiled its first step
                self._first = self._clock(), sum(self._counts.values())
        else:
            latest = max(workers, key=lambda worker: worker.heard)
            self._where = f"{latest.name}: {latest.where}"
        self.stop.poll()

    def untried(self) -> Iterator[str]:
        """Yield what the check has not done yet."""
        for name in self._left:
            done = min(self._counts.values(), default=0) if name == self._stage else 0
            yield f"{name}, from step {done + 1} on" if done else name

    def text(self) -> str:
        """Describe the current task, its duration, and how long the runs may take; "" if there is none."""
        if not self._stage:
            return ""
        counts = ", ".join(f"{side} {count}" for side, count in self._counts.items())
        what = f"{counts} of {self._steps} steps" if counts else self._what or self._where
        seconds = self._clock() - self._began
        return on_one_line(f"{self._stage}{what and f': {what}'}  ·  {_in_words(seconds)}{self._rest(seconds)}")

    def _rest(self, seconds: float) -> str:
        """Estimate how long the runs will take: the rest of this one, and later ones, which take at most as long."""
        since, first = self._first
        done = sum(self._counts.values())
        if done <= first or not first:
            return ""
        rest = (self._clock() - since) / (done - first) * (self._steps * len(self._counts) - done)
        later = sum(name in RUNS and name != self._stage for name in self._left)
        return f"  ·  the runs end in about {_in_words(rest + later * max(self._took, seconds + rest))}"

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the progress while the body of the `with` statement runs; a terminal's line is clear afterwards."""
        try:
            with repeating(lambda _: self.show(), EVERY[self._rewrites]):
                yield
        finally:
            with self._lock, suppress(OSError, ValueError):
                if self._line is not None:
                    self._line.close()

    def show(self) -> None:
        """Show what is being done now, over what was before."""
        text = self.text()
        with self._lock, suppress(OSError, ValueError):  # the stream is closed
            if self._line is not None:
                self._line.set_description_str(text)
            elif text:
                self._tell(text)

    def say(self, line: str) -> None:
        """Print a line that stays."""
        with self._lock, suppress(OSError, ValueError):
            if self._line is not None:
                self._line.clear()
            self._tell(on_one_line(line))


def _line(stream: TextIO) -> "tqdm[Any]":
    """Return a line of a terminal that is rewritten, cut to its width, and cleared at the end."""
    unknown = _columns(stream) == 0  # tqdm would cut the line to nothing
    width = {"ncols": WIDTH, "nrows": 20} if unknown else {"dynamic_ncols": True}
    return tqdm(file=stream, bar_format="{desc}", leave=False, miniters=1, mininterval=0, **width)


def _columns(stream: TextIO) -> int:
    """Return the width of a terminal; 0 if it does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return 0


def _can_rewrite(stream: Any) -> bool:
    return type(stream).__module__.startswith("ipykernel") or bool(stream.isatty())


def _in_words(seconds: float) -> str:
    """Format a duration.

    >>> [_in_words(x) for x in (3.2, 89.0, 130.0, 7200.0)]
    ['3 s', '89 s', '2 min', '120 min']
    """
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
