"""Jobs that a soak kills: commands, the steps they have reached and saved, and the processes to kill."""

import contextlib
import json
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from jaxddp.parity.family import family

WORKER = Path(__file__).with_name("torch_job.py")
LOG_EVERY = 50  # steps; the worker's is the same


@dataclass(frozen=True)
class SoakJob:
    """A job of four replicas on the CPU, which trains the convnet until it is killed.

    Attributes:
        folder: its run folder.
        every: seconds between two checkpoints.
        name: name in a report.
        variables: environment variables that it needs.
    """

    name: ClassVar[str]
    variables: ClassVar[Mapping[str, str]] = {}
    folder: Path
    every: float

    def command(self) -> list[str]:
        """Return the command that starts the job or goes on with it."""
        raise NotImplementedError

    def steps(self) -> list[int]:
        """Return the steps that its log holds, in the order in which they were written."""
        numbers: list[int] = []
        lines = self._log().read_bytes().splitlines() if self._log().exists() else []
        for line in lines:
            with contextlib.suppress(ValueError):  # a line that was cut by a kill
                record = json.loads(line)
                if isinstance(record, dict) and record.get("kind", "step") == "step":
                    numbers.append(record["step"])
        return numbers

    def reached(self) -> int:
        """Return the last step in the log, 0 if there is none."""
        return next(reversed(self.steps()), 0)

    def saved(self) -> int:
        """Return the step of the newest complete checkpoint, 0 if there is none."""
        return max(map(int, self._checkpoints()), default=0)

    def damaged(self) -> int:
        """Return the number of checkpoints that were found damaged."""
        return len([*self.folder.glob("checkpoints/*.damaged")])

    def victim(self, root: int, rng: random.Random) -> int:
        """Return the process to kill: here the only one."""
        return root

    def _log(self) -> Path:
        raise NotImplementedError

    def _checkpoints(self) -> list[str]:
        raise NotImplementedError


class JaxddpJob(SoakJob):
    """`jaxddp.train` on four CPU devices in one process, resumed by hand after each kill."""

    name = "jaxddp"

    def command(self) -> list[str]:
        """Return the command that starts the job or goes on with it."""
        train = [sys.executable, "-m", "jaxddp.train"]
        if self.saved():
            return [*train, "--resume", str(self.folder)]
        options = {
            "--model": "convnet",
            "--devices": "4",
            "--platform": "cpu",
            "--epochs": "1000000",
            "--log-every": str(LOG_EVERY),
            "--checkpoint-every": f"{self.every / 60:.4f}minutes",
            "--keep-checkpoints": "2",
            "--output": str(self.folder),
        }
        return [*train, *(word for option in options.items() for word in option)]

    def _log(self) -> Path:
        return self.folder / "metrics.jsonl"

    def _checkpoints(self) -> list[str]:
        return [path.name for path in self.folder.glob("checkpoints/*") if path.name.isdigit()]


class TorchDDPJob(SoakJob):
    """DDP under torchrun, which starts all workers again when one dies, with torch.distributed.checkpoint."""

    name = "torchrun + DDP + torch.distributed.checkpoint"
    # without it torch 2.13's new workers read the dead ones' addresses from the store that all restarts share
    variables: ClassVar[Mapping[str, str]] = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def command(self) -> list[str]:
        """Return the command that starts the job or goes on with it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4"]
        return [*run, "--max-restarts", "1000000", str(WORKER), str(self.folder), str(self.every)]

    def victim(self, root: int, rng: random.Random) -> int:
        """Return a worker, drawn by chance."""
        workers = [process for process in family(root) if process != root and _runs_worker(process)]
        return rng.choice(sorted(workers)) if workers else root

    def _log(self) -> Path:
        return self.folder / "steps.jsonl"

    def _checkpoints(self) -> list[str]:
        return [path.parent.name for path in self.folder.glob("*/.metadata")]


def _runs_worker(process: int) -> bool:
    try:
        return str(WORKER).encode() in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return False
