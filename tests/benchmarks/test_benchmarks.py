"""Benchmark: races, targets and texts on made-up numbers, and the same losses from every contender."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import race, report, run, targets
from benchmarks.__main__ import RaceOptions
from benchmarks.contenders import JAXDDP, LABELS, Field, names
from benchmarks.jax_peers import ByHand, Way
from benchmarks.race import Failed, Length, Turn
from benchmarks.torch_ranks import torch_ranks
from benchmarks.workloads import Workload, workloads

ROOT = Path(__file__).parents[2]
SMALL = workloads(small=True)
BATCH_NORM = ("convnet", "char_mlp", "residual")
SAME = 3e-6  # relative difference of a loss in float32; measured: 4e-7 (llama)
SAME_IN_DROPOUT = 0.1  # masks differ between the contenders; measured: 0.04
OTHER_LR = 1.1  # times the learning rate; measured: the losses then differ by 4e-4


class Clockwork:
    """Contender whose steps take the given times, one per turn, on a made-up clock."""

    def __init__(self, now: list[float], seconds: float, order: list[str] | None = None, name: str = ""):
        self._now, self._seconds, self._order, self._name = now, seconds, order, name

    def train(self, steps: int) -> Turn:
        self._now[0] += self._seconds * steps
        if self._order is not None:
            self._order.append(self._name)
        return Turn(self._seconds * steps, [0.5] * steps)


def test_contenders_take_turns_and_another_one_starts_each_round() -> None:
    now, order = [0.0], list[str]()
    builders = {name: lambda name=name: Clockwork(now, 0.1, order, name) for name in "abc"}
    results = race.run(builders, Length(rounds=3, seconds=1.0, steps_per_epoch=10), lambda: now[0])
    assert "".join(order[-9:]) == "abcbcacab"
    assert {name: result.steps for name, result in results.items()} == dict.fromkeys("abc", 10)
    assert results["a"].seconds_per_step == pytest.approx([0.1] * 3)


def test_compiling_does_not_shorten_a_turn() -> None:
    now = [0.0]

    class Compiling(Clockwork):
        """Contender that compiles a program at step 1, and another for the smaller batch at step 10."""

        met = 0

        def train(self, steps: int) -> Turn:
            turn = super().train(steps)
            compiled = (self.met < 1) + (self.met < 10 <= steps)
            self.met = max(self.met, steps)
            return Turn(turn.seconds + 3.0 * compiled, turn.losses)

    results = race.run({"a": lambda: Compiling(now, 0.001)}, Length(3, 1.0, 10), lambda: now[0])
    assert results["a"].steps == 1000
    assert results["a"].seconds_per_step == pytest.approx([0.001] * 3)


def test_a_slow_contender_is_left_out_of_the_last_rounds() -> None:
    now = [0.0]
    builders = {"fast": lambda: Clockwork(now, 0.01), "slow": lambda: Clockwork(now, 13.0)}
    results = race.run(builders, Length(rounds=5, seconds=1.0, steps_per_epoch=10), lambda: now[0])
    assert [len(results[name].seconds_per_step) for name in ("fast", "slow")] == [5, 3]
    assert race.ratio(results["slow"].seconds_per_step, results["fast"].seconds_per_step).median == 1300


def test_a_contender_that_fails_is_kept_with_its_reason() -> None:
    def fail() -> Clockwork:
        raise Failed("no compiler")

    now = [0.0]
    results = race.run({"a": lambda: Clockwork(now, 0.1), "b": fail}, Length(2, 1.0, 10), lambda: now[0])
    assert results["b"].failure == "no compiler" and len(results["a"].seconds_per_step) == 2


def made_up_race(workload: str, replicas: int, ratios: Mapping[str, float]) -> dict[str, Any]:
    seconds = {"median": 0.002, "min": 0.001, "max": 0.003}
    return {
        "workload": workload,
        "replicas": replicas,
        "examples_per_step": 128,
        "steps_per_batch": 8,
        "contenders": {
            JAXDDP: {"seconds_per_step": seconds, "rounds": [0.002] * 3},
            **{name: {"seconds_per_step": seconds, "rounds": [0.002] * 3} for name in ratios},
            "torch_compile": {"failure": "no compiler"},
        },
        "ratios": {name: {"median": ratio, "min": ratio, "max": ratio} for name, ratio in ratios.items()},
    }


def rows_of(*races: dict[str, Any], **parts: Any) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in targets.rows({"races": races, **parts})}


@pytest.mark.parametrize(
    ("id", "workload", "replicas", "peer", "good", "bad"),
    [
        ("1a", "mlp", 2, "torch", 8.0, 7.9),
        ("1c", "residual", 2, "torch", 1.5, 1.4),
        ("1e", "llama", 2, "torch_compile", 1.0, 0.99),
        ("2a", "decoder", 2, "pmap", 1 / 1.02, 1 / 1.03),
        ("2b", "decoder", 1, "jit", 1 / 1.05, 1 / 1.06),
        ("3", "two_convs", 2, "one_step", 1.0, 0.5),
    ],
)
def test_a_target_is_met_or_missed(id: str, workload: str, replicas: int, peer: str, good: float, bad: float) -> None:
    assert rows_of(made_up_race(workload, replicas, {peer: good}))[id]["met"]
    row = rows_of(made_up_race(workload, replicas, {peer: bad}))[id]
    assert row["met"] is False and row["missed_by"].keys() == {workload}


def test_the_faster_hand_written_step_counts() -> None:
    row = rows_of(made_up_race("mlp", 2, {"pmap": 2.0, "pmap_scan": 0.8}))["2a"]
    assert row["value"] == 1.25


def test_the_worst_workload_counts() -> None:
    races = [made_up_race(name, 2, {"torch": ratio}) for name, ratio in (("convnet", 1.2), ("two_convs", 2.0))]
    row = rows_of(*races)["1c"]
    assert (row["value"], row["of"], row["met"]) == (1.2, "convnet", False)


def test_targets_that_were_not_measured_are_neither_met_nor_missed() -> None:
    assert {row["met"] for row in targets.rows({"races": []})} == {None}


def test_the_text_shows_ratios_failures_and_targets() -> None:
    races = [made_up_race("mlp", 2, {"pmap": 1.25, "torch": 8.4}), made_up_race("llama", 2, {"torch": 150.0})]
    origin = {"date": "2026-01-01", "hardware": "x", "load_average_before": 0.1, "versions": {"jax": "0.10"}}
    origin |= {"torch_backend": "gloo", "gpu": "not measured", "seconds": 9.0, "command": "python -m benchmarks"}
    text = re.sub(" +", " ", report.text({"races": races, "targets": targets.rows({"races": races}), **origin}))
    assert "1.25 ±0.00" in text and "150 ±0.00" in text
    assert "failed: torch_compile of mlp, 2 replicas: no compiler" in text
    assert "| met | 1a | at least 8 x the default MLP's steps of torch DDP " in text and "not measured" in text


@contextmanager
def field_of(workload: Workload, world_size: int) -> Iterator[Field]:
    with torch_ranks(world_size, "cpu") as ranks:
        yield Field(workload, jax.devices("cpu")[:world_size], ranks)


def losses(workload: Workload, contenders: list[str], world_size: int = 2) -> dict[str, list[float]]:
    """Return the losses of the first three steps of each contender."""
    with field_of(workload, world_size) as field:
        builders = field.builders(contenders)
        return {name: builders[name]().train(3).losses[:3] for name in contenders}


def gap(losses: dict[str, list[float]]) -> float:
    """Return the largest relative difference from jaxddp's losses."""
    return max(float(np.max(np.abs(np.divide(theirs, losses[JAXDDP]) - 1))) for theirs in losses.values())


def comparable(workload: Workload) -> list[str]:
    """Return the contenders at two replicas that compute the same; torch.compile has another test."""
    same = [name for name in names(workload, 2) if name != "torch_compile"]
    if workload.name in BATCH_NORM:  # one device takes the statistics over the full batch
        same.remove("jit")
    return same


@pytest.mark.large
@pytest.mark.parametrize("name", SMALL)
def test_all_contenders_compute_the_same_losses(name: str) -> None:
    limit = SAME_IN_DROPOUT if name == "decoder_dropout" else SAME
    assert gap(losses(SMALL[name], comparable(SMALL[name]))) < limit


@pytest.mark.large
@pytest.mark.parametrize("name", [name for name in SMALL if name != "decoder_dropout"])
def test_one_device_by_hand_computes_the_same_losses(name: str) -> None:
    assert gap(losses(SMALL[name], [JAXDDP, "jit", "jit_scan"], world_size=1)) < SAME


@pytest.mark.large
def test_torch_compile_computes_the_same_losses() -> None:
    assert gap(losses(SMALL["mlp"], [JAXDDP, "torch_compile"])) < SAME


@pytest.mark.large
def test_another_learning_rate_shows_in_the_losses() -> None:
    ours = losses(SMALL["mlp"], [JAXDDP])
    theirs = losses(SMALL["mlp"].with_lr(1e-3 * OTHER_LR), ["pmap", "torch"])
    for name in theirs:
        assert gap({**ours, name: theirs[name]}) > 10 * SAME, name


def test_hand_written_loops_see_every_example_once_per_epoch() -> None:
    devices = jax.devices("cpu")
    ways: tuple[tuple[Way, int, int], ...] = (
        ("pmap", 2, 1),
        ("pmap", 2, 3),
        ("shard_map", 2, 1),
        ("jit", 1, 1),
        ("jit", 1, 3),
    )
    for way, world_size, steps in ways:
        by_hand = ByHand(SMALL["convnet"], devices[:world_size], way, steps)
        seen = np.concatenate([indices.ravel() for indices in by_hand._indices(0)])
        np.testing.assert_array_equal(np.unique(seen), np.arange(1437))
        assert len(seen) == 1437 + 1437 % world_size


def test_races_with_all_peers_are_at_two_replicas() -> None:
    heats = run.plan(RaceOptions(workloads=("mlp", "decoder"), parts=("race", "measures")), [1, 2, 8])
    assert [(heat.workload.name, heat.replicas, heat.inside) for heat in heats] == [
        *(("mlp", 1, False), ("mlp", 2, True), ("mlp", 8, False)),
        *(("decoder", 1, False), ("decoder", 2, True), ("decoder", 8, False)),
    ]
    assert set(heats[1].names) == LABELS.keys() - {"jit_scan"}
    assert heats[4].names == heats[1].names
    assert heats[2].names == [JAXDDP, "pmap", "torch"]


@pytest.mark.large
def test_torch_ranks_load_no_jax() -> None:
    code = "import sys, benchmarks.in_torch, benchmarks.__main__; print({'jax', 'flax', 'torch'} & sys.modules.keys())"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "{'torch'}\n"


@pytest.mark.large
def test_the_smoke_run_measures_everything(tmp_path: Path) -> None:
    output = tmp_path / "folder" / "record.json"
    command = [sys.executable, "-m", "benchmarks", "--smoke", "--output", str(output)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "wide_mlp" in ran.stdout and "targets" in ran.stdout
    record = json.loads(output.read_text())
    assert {"races", "jobs", "costs", "growth", "reading", "targets"} <= record.keys()
    for of_race in record["races"]:
        assert not [name for name, contender in of_race["contenders"].items() if "failure" in contender]
        assert of_race["ratios"].keys() == of_race["contenders"].keys() - {JAXDDP}
    races = {of_race["workload"]: of_race for of_race in record["races"]}
    assert races.keys() == SMALL.keys()
    assert races["mlp"]["program"]["all_reduces_per_step"] == 1
    assert races["mlp"]["traces"]["second_epoch"] == 0


def test_saved_records_say_where_they_come_from() -> None:
    saved = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert saved
    for path in saved:
        record = json.loads(path.read_text())
        assert {"command", "date", "hardware", "load_average_before", "versions"} <= record.keys()
        if "races" in record:  # older records have another form
            assert report.text(record)
