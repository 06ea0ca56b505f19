"""Writers of metrics beside metrics.jsonl, with stand-ins for the libraries, which are not installed here."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxddp.config import TrainConfig
from jaxddp.errors import InputError, TrainingError
from jaxddp.tracking.gradient_metrics import LOG2_BINS
from jaxddp.tracking.run_folder import claim_output
from jaxddp.tracking.run_log import RunLog

Calls = list[tuple[Any, ...]]


def wandb(calls: Calls) -> Any:
    def init(**options: Any) -> Any:
        calls.append(("init", options["id"], options["name"], options["config"]["epochs"], options["resume"]))
        return SimpleNamespace(
            id=options["id"] or "r1",
            log=lambda values, step: calls.append(("log", step, values)),
            finish=lambda: calls.append(("finish",)),
        )

    def histogram(np_histogram: Any) -> Any:
        counts, edges = np_histogram
        return len(counts), len(edges), int(counts.sum())

    return SimpleNamespace(init=init, Histogram=histogram)


def mlflow(calls: Calls) -> Any:
    def start_run(run_id: str | None, run_name: str, description: str) -> Any:
        calls.append(("init", run_id, run_name, description))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "r1"))

    return SimpleNamespace(
        set_experiment=lambda name: calls.append(("experiment", name)),
        start_run=start_run,
        log_params=lambda values: calls.append(("params", len(values) <= 100, values.get("epochs"))),
        log_metrics=lambda values, step: calls.append(("log", step, values)),
        end_run=lambda: calls.append(("finish",)),
    )


def log(folder: Path, tracker: str, resume_step: int | None = None) -> None:
    config = TrainConfig(epochs=1, track=(tracker,), output=str(folder))
    options: dict[str, Any] = {"title": "a test", "examples_per_epoch": 64, "resume_step": resume_step}
    with claim_output(str(folder), resume_step is not None), RunLog(config, folder, **options) as run:
        run.step(1, 1, {"loss": 0.5, "accuracy": float("nan")}, examples=64)
        run.histograms(1, {"fc": [1] * len(LOG2_BINS)})
        run.epoch(1, 1, {"loss": 0.5}, {"loss": 0.25}, examples_per_second=10)


@pytest.mark.parametrize(("name", "library"), [("wandb", wandb), ("mlflow", mlflow)])
def test_a_service_gets_the_metrics_of_a_run_and_a_resumed_run_continues_it(
    name: str, library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Calls = []
    monkeypatch.setitem(sys.modules, name, library(calls))
    log(tmp_path / "run", name)
    assert not (tmp_path / "run" / "tensorboard").exists()
    logged = {tag: value for kind, *rest in calls if kind == "log" for tag, value in rest[1].items()}
    assert logged["loss/step"] == logged["loss/train"] == 0.5 and logged["loss/test"] == 0.25
    assert [step for kind, *rest in calls if kind == "log" for step in rest[:1]] == [1] * (3 if name == "wandb" else 2)
    assert ("accuracy/step" in logged) == (name == "wandb")  # NaN
    if name == "wandb":
        assert logged["grad_log2/fc"] == (len(LOG2_BINS), len(LOG2_BINS) + 1, len(LOG2_BINS))
        assert calls[0] == ("init", None, "run", 1, "allow")
    else:
        assert calls[:2] == [("experiment", "jaxddp"), ("init", None, "run", "a test")]
        assert [params for params in calls if params[0] == "params" and params[2] == 1] == [("params", True, 1)]
        assert all(params[1] for params in calls if params[0] == "params")
    assert calls[-1] == ("finish",)
    calls.clear()
    log(tmp_path / "run", name, resume_step=0)
    assert calls[0][:2] == ("init", "r1") and not any(call[0] == "params" for call in calls)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_library_that_is_missing_or_fails_is_told_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=rf'^--track {name}: {name} is not installed: pip install "{name}(-skinny)?"$'):
        log(tmp_path / "run", name)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no\nnetwork")

    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=refuse, set_experiment=refuse))
    with pytest.raises(TrainingError, match=f"^--track {name}: no network$"):
        log(tmp_path / "other", name)
