"""Weights with the best metric of a test, for `--keep-best`."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxddp.tracking.run_log import RunLog
from jaxddp.tracking.stopping import is_better
from torch_ref.local_sgd import shown
from torch_ref.weights import save_weights

if TYPE_CHECKING:
    from torch_ref.train_loop import Run

BEST_FILE = "model_best.safetensors"


class BestWeights:
    """The file of the weights whose `--best-metric` was best among the steps with a checkpoint.

    Args:
        run: the run.
        log: log of the run.
        notes: those of the checkpoint from which the run continues.
    """

    def __init__(self, run: "Run", log: RunLog, notes: Mapping[str, Any]):
        self._run, self._log = run, log
        self.best: float | None = notes.get("best")
        """The metric, for a checkpoint's `notes["best"]`; None before the first one."""

    def tested(self, metrics: Mapping[str, float]) -> None:
        """Write the weights, on rank 0, if the test at this checkpoint is the best one; all ranks must call it."""
        run, config = self._run, self._run.config
        value = metrics.get(config.best_metric, math.nan)
        if config.output is None or not config.keep_best or not is_better(value, self.best, config.best_mode):
            return
        self.best = value
        with shown(run.state.module, config, run.world):
            if run.world.rank == 0:
                with self._log.writing():
                    save_weights(Path(config.output) / BEST_FILE, run.state.module)
