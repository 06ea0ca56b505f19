"""Early stopping: the end of a run whose metric no longer improves. Both trainers use it."""

import math
from collections.abc import Mapping
from typing import Any

from jaxddp.config import TrainerConfig
from jaxddp.errors import InputError


def is_better(value: float, best: float | None, mode: str) -> bool:
    """Return whether a metric is better than the best so far; NaN is worse than any number.

    Args:
        best: None: there is none yet.
        mode: "min" or "max".

    >>> is_better(0.5, math.nan, "min"), is_better(math.nan, None, "min"), is_better(0.5, 0.4, "max")
    (True, False, True)
    """
    if math.isnan(value) or best is None or math.isnan(best):
        return not math.isnan(value)
    return value < best if mode == "min" else value > best


class Stopping:
    """Count of the tests since `--best-metric` was best.

    Args:
        config: configuration of the run.
        notes: those of the checkpoint from which the run continues.
        judged: split whose metrics are given; without tests it is "train".

    >>> stopping = Stopping(TrainerConfig(early_stopping_patience=1))
    >>> for loss in (0.5, 0.4, 0.4):
    ...     _ = stopping.tested({"loss": loss})
    ...     print(stopping.reason)
    None
    None
    stopped early: no smaller loss in 1 test
    """

    def __init__(self, config: TrainerConfig, notes: Mapping[str, Any] | None = None, judged: str = "test"):
        self._config, self._unit = config, {"test": "test", "train": "epoch"}[judged]
        self._best, self._waited = (notes or {}).get("stopping", (None, 0))
        self.asked: str | None = None
        """The function of the program that has asked for the end."""

    @property
    def notes(self) -> tuple[float | None, int]:
        """Note of a checkpoint, for `notes["stopping"]`."""
        return self._best, self._waited

    @property
    def reason(self) -> str | None:
        """Line that says why the run ends; None: it continues."""
        if self.asked is not None:
            return f"stopped by {self.asked}"
        config, patience = self._config, self._config.early_stopping_patience
        if patience is None or self._waited < patience:
            return None
        better = "smaller" if config.best_mode == "min" else "larger"
        times = f"{self._waited} {self._unit}{'s' * (self._waited > 1)}"
        return f"stopped early: no {better} {config.best_metric} in {times}"

    def tested(self, metrics: Mapping[str, float]) -> float:
        """Count a test; return its `--best-metric`.

        Raises:
            InputError: the test does not have it.
        """
        value = metrics.get(self._config.best_metric)
        if value is None:
            known = ", ".join(metrics)
            raise InputError(f"--best-metric {self._config.best_metric}: not a metric of the test (one of {known})")
        if is_better(value, self._best, self._config.best_mode):
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        return value
