"""Writers of a run's metrics in addition to metrics.jsonl: TensorBoard's files, Weights & Biases, MLflow."""

import contextlib
import dataclasses
import importlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxddp.config import TrainerConfig
from jaxddp.errors import InputError, TrainingError, not_installed, reason, shortened
from jaxddp.files import write_atomically
from jaxddp.tracking.gradient_metrics import LOG2_BINS
from jaxddp.tracking.tensorboard import EventFile

TENSORBOARD_FOLDER = "tensorboard"
PROJECT = "jaxddp"  # unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME says otherwise
MOST_PARAMETERS = 100  # that an MLflow server takes at once


class WandB:
    """A run of Weights & Biases, which a resumed run continues; the arguments are those of `writers`."""

    def __init__(self, config: TrainerConfig, output: Path, title: str):
        self._wandb = _library("wandb")
        self.path = output / "wandb.txt"
        place = {"project": os.environ.get("WANDB_PROJECT", PROJECT), "name": output.name, "dir": str(output)}
        with _one_line("wandb"):
            known = _known(output, "wandb")
            self._run = self._wandb.init(
                **place, id=known, resume="allow", notes=title, config=dataclasses.asdict(config)
            )
            _remember(output, "wandb", self._run.id)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write metrics by tag."""
        with _one_line("wandb"):
            self._run.log(dict(values), step=step)

    def histogram(self, tag: str, counts: Sequence[int], step: int) -> None:
        """Write a histogram."""
        edges = np.arange(LOG2_BINS[0], LOG2_BINS[-1] + 2)
        with _one_line("wandb"):
            self._run.log({tag: self._wandb.Histogram(np_histogram=(np.array(counts), edges))}, step=step)

    def close(self) -> None:
        """Send what is left."""
        with _one_line("wandb"):
            self._run.finish()


class MLflow:
    """A run of MLflow, which a resumed run continues; it keeps no histograms. The arguments are those of `writers`."""

    def __init__(self, config: TrainerConfig, output: Path, title: str):
        self._mlflow = _library("mlflow")
        self.path = output / "mlflow.txt"
        with _one_line("mlflow"):
            known = _known(output, "mlflow")
            if known is None:
                self._mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
            run = self._mlflow.start_run(run_id=known, run_name=output.name, description=title)
            _remember(output, "mlflow", run.info.run_id)
            if known is None:  # a parameter cannot change
                parameters = [*dataclasses.asdict(config).items()]
                for first in range(0, len(parameters), MOST_PARAMETERS):
                    self._mlflow.log_params(dict(parameters[first : first + MOST_PARAMETERS]))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write metrics by tag; servers take no NaN."""
        with _one_line("mlflow"):
            self._mlflow.log_metrics({tag: x for tag, x in values.items() if math.isfinite(x)}, step=step)

    def histogram(self, tag: str, counts: Sequence[int], step: int) -> None:
        """Write nothing: MLflow has no histograms."""

    def close(self) -> None:
        """Send what is left."""
        with _one_line("mlflow"):
            self._mlflow.end_run()


Writer = EventFile | WandB | MLflow  # each has a path, for messages; steps count from 1


def writers(config: TrainerConfig, output: Path, title: str, resume_step: int | None) -> Iterator[Writer]:
    """Yield the writers that `--track` names.

    Args:
        config: configuration of the run, which the services show.
        output: run folder, whose name is that of the run.
        title: description of the run.
        resume_step: step after which the run continues; None: it is new.

    Raises:
        InputError: a library is not installed.
        TrainingError: a service refuses the run.
        OSError: a file cannot be written.
    """
    for name in dict.fromkeys(config.track):
        if name == "tensorboard":
            yield EventFile(output / TENSORBOARD_FOLDER, resume_step)
        else:
            yield (WandB if name == "wandb" else MLflow)(config, output, title)


def check_installed(config: TrainerConfig) -> None:
    """Raise `InputError` unless the libraries of the services that `--track` names are installed."""
    for name in {*config.track} & {"wandb", "mlflow"}:
        _library(name)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(f"--track {name}: {not_installed(error) or reason(error)}") from None


def _known(output: Path, name: str) -> str | None:
    """Return the service's name of this run, if an earlier process has begun it."""
    path = output / f"{name}.txt"
    return path.read_text().strip() if path.exists() else None


def _remember(output: Path, name: str, run: str) -> None:
    write_atomically(output / f"{name}.txt", f"{run}\n".encode())


@contextlib.contextmanager
def _one_line(name: str) -> Iterator[None]:
    """Turn a service's exception into a `TrainingError` of one line."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # of many types
        raise TrainingError(f"--track {name}: {shortened(' '.join(str(error).split()))}") from error
