"""A job under way: started again when it ends, looked at, and killed."""

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from benchmarks.soak.jobs import SoakJob
from benchmarks.soak.resources import sample
from jaxddp.parity.family import family

FURTHER = 100  # steps beyond those of before a kill, after which a job counts as recovered


@dataclass
class Kill:
    """A kill, and what it cost.

    Attributes:
        seconds: time since the soak's start.
        signal: name of the signal.
        reached: last step in the log before it.
        resumed: step of the newest complete checkpoint after it; None: not looked yet.
        recovery: seconds until the log was `FURTHER` steps beyond `reached`; None: it never was.
    """

    seconds: float
    signal: str
    reached: int
    resumed: int | None = None
    recovery: float | None = None


@dataclass
class WatchedJob:
    """A job under way.

    Attributes:
        job: the job.
        seed: seed of the choice of a process to kill.
        starts: number of times that it was started.
        codes: exit codes of the starts that have ended.
        kills, samples: what was done and seen.
    """

    job: SoakJob
    seed: int
    starts: int = 0
    codes: list[int] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._process: subprocess.Popen[bytes] | None = None

    def keep_running(self) -> None:
        """Start the job if it does not run."""
        if self._process is not None and self._process.poll() is None:
            return
        if self._process is not None:
            self.codes.append(self._process.returncode)
        with self.job.folder.with_suffix(".log").open("ab") as said:
            self._process = subprocess.Popen(
                self.job.command(),
                env={**os.environ, **self.job.variables},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
        self.starts += 1

    def look(self, seconds: float) -> None:
        """Take a sample, and see how far the job has come since the last kill."""
        self.samples.append(sample(self._root, self.job.folder, seconds))
        last = self.kills[-1] if self.kills else None
        if last is None:
            return
        if last.resumed is None:
            last.resumed = self.job.saved()
        if last.recovery is None and self.job.reached() >= last.reached + FURTHER:
            last.recovery = round(seconds - last.seconds, 1)

    def kill(self, number: signal.Signals, seconds: float) -> None:
        """Send a signal to one process of the job."""
        self.kills.append(Kill(round(seconds, 1), number.name, self.job.reached()))
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.job.victim(self._root, self._rng), number)

    def end(self) -> None:
        """Kill what is left."""
        if self._process is None:
            return
        for process in family(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.wait()

    def record(self) -> dict[str, Any]:
        """Return what was seen, for a report."""
        steps = self.job.steps()
        return {
            "starts": self.starts,
            "exit_codes": dict(Counter(self.codes)),
            "steps": max(steps, default=0),
            "written_once": len(steps) == len(set(steps)) and steps == sorted(steps),
            "damaged": self.job.damaged(),
            "kills": [dataclasses.asdict(one) for one in self.kills],
            "samples": self.samples,
        }

    @property
    def _root(self) -> int:
        assert self._process is not None, "started by keep_running"
        return self._process.pid
