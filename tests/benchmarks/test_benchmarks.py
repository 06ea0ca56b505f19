"""Benchmark: the form of its record, the hand-written step, and the count of all-reduces."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

from benchmarks import report, steps_per_second
from benchmarks.contenders import COMPARISONS, JIT, JIT_ONE, LABELS, PMAP, PMAP_ONE, TORCH
from benchmarks.hand_written import HandWritten
from benchmarks.hlo import all_reduces
from jaxddp import DataParallel, Loader, Replicas, models, optim
from jaxddp.data.torch_rng import Generator

SAME = 1e-12  # float64, relative to the largest parameter; measured: 0, the same bits


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run a small benchmark and return its record."""
    output = tmp_path_factory.mktemp("benchmark") / "folder" / "record.json"
    options = steps_per_second.Options(rounds=2, steps=1, replicas=(2,), platform="cpu", output=output)
    record = steps_per_second.main(options)
    assert json.loads(output.read_text()) == record
    return record


@pytest.mark.large
def test_the_record_has_every_contender(ran: dict[str, Any]) -> None:
    assert [(c["name"], c["replicas"]) for c in ran["contenders"]] == [
        (label, 1 if label in (JIT, JIT_ONE) else 2) for label in LABELS
    ]
    assert ran["optimizer_steps"] == 45  # --steps 1 is rounded up to an epoch
    for contender in ran["contenders"]:
        speed, seconds = contender["steps_per_second"], contender["seconds_per_step"]
        assert 0 < speed["min"] <= speed["median"] <= speed["max"]
        assert len(seconds) == 2 and 1 / max(seconds) == pytest.approx(speed["min"], rel=1e-3)


@pytest.mark.large
def test_every_contender_trains(ran: dict[str, Any]) -> None:
    losses = {c["name"]: c["last_epoch_loss"] for c in ran["contenders"]}
    assert losses.pop(TORCH) == pytest.approx(losses[LABELS[0]], rel=1e-3)  # the same examples in the same order
    assert all(1.9 < loss < 2.1 for loss in losses.values()), losses  # log 10 at the start


@pytest.mark.large
def test_the_record_compares_like_with_like(ran: dict[str, Any]) -> None:
    seconds = {c["name"]: np.array(c["seconds_per_step"]) for c in ran["contenders"]}
    assert {(r["jaxddp"], r["other"]) for r in ran["ratios"]} == {(a, b) for a in COMPARISONS for b in COMPARISONS[a]}
    for ratio in ran["ratios"]:
        assert ratio["median"] == pytest.approx(np.median(seconds[ratio["other"]] / seconds[ratio["jaxddp"]]), rel=2e-3)


@pytest.mark.large
def test_the_record_has_device_versions_command_and_job(ran: dict[str, Any]) -> None:
    assert ran["device"] == "cpu" and ran["gpu"] == "not measured"
    assert {"python", "jax", "torch"} <= ran["versions"].keys()
    assert ran["command"].endswith("benchmarks.steps_per_second --rounds 2 --steps 1 --replicas 2 --platform cpu")
    assert "32 examples per step over all replicas (per replica: 16 at 2)" in ran["job"]


@pytest.mark.large
def test_the_program_of_the_default_job_has_one_all_reduce(ran: dict[str, Any]) -> None:
    program = ran["programs"]["2"]
    assert program["all_reduces_per_step"] == 1
    assert program["gradient_bytes"] == 4 * (64 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10)
    assert program["all_reduced_bytes_per_step"] == program["gradient_bytes"] + 3 * 4  # loss, count, accuracy


@pytest.mark.large
def test_the_text_shows_every_row(ran: dict[str, Any]) -> None:
    text = report.text(ran)
    for label in LABELS:
        assert f"\n  {label} " in text
    assert max(map(len, text.splitlines())) < 200


@pytest.mark.parametrize(
    ("other", "speed", "met"),
    [(PMAP, 0.953, True), (PMAP_ONE, 0.951, False), (TORCH, 3.0, True), (TORCH, 2.9, False)],
)
def test_an_aim_is_met_or_missed(other: str, speed: float, met: bool) -> None:
    (aim,) = report.aims([{"jaxddp": "jaxddp", "other": other, "replicas": 2, "median": speed}])
    assert aim["met"] is met


def gap_by_hand(steps_per_dispatch: int, plain: bool = False, lr: float = 1e-3) -> float:
    """Return the relative difference of the hand-written step's parameters from jaxddp's after 12 float64 steps."""
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(96, 5)), "y": rng.integers(0, 3, 96)}
    replicas = Replicas(jax.devices("cpu")[: 1 if plain else 2])
    with jax.enable_x64(True):
        model = models.MLP(5, (7, 6), 3, generator=Generator(0))
        ddp = DataParallel(model, optim.adam(1e-3), replicas=replicas, dtype="float64")
        by_hand = HandWritten(optim.adam(lr), replicas.devices, plain=plain, steps_per_dispatch=steps_per_dispatch)
        ours = ddp.init()
        flat = jax.device_get(ours.params)
        layers = [(flat[f"layers.{i}.kernel"], flat[f"layers.{i}.bias"]) for i in range(3)]
        theirs = by_hand.place((layers, jax.device_get(optim.adam().init(layers))))
        loader = Loader(data, replicas, global_batch_size=24, steps_per_dispatch=steps_per_dispatch)
        for epoch in range(3):
            for batch in loader.epoch(epoch):
                arrays = {name: np.asarray(x) for name, x in batch.last.items()}  # (W, K, b, ...)
                arrays = {name: x if steps_per_dispatch > 1 else x[:, 0] for name, x in arrays.items()}
                arrays = {name: x[0] if plain else x for name, x in arrays.items()}
                theirs, _ = by_hand.step(theirs, jax.device_put(arrays, by_hand.batch_sharding))
                ours, _ = ddp.steps(ours, batch)
        params = jax.device_get(ours.params)
        assert {x.dtype for x in params.values()} == {np.dtype("float64")}
        pairs = [
            (params[f"layers.{i}.{n}"], x)
            for i, layer in enumerate(theirs[0])
            for n, x in zip(("kernel", "bias"), layer, strict=True)
        ]
        return max(float(np.abs(a - np.asarray(b)).max()) for a, b in pairs) / max(np.abs(a).max() for a, _ in pairs)


@pytest.mark.large
@pytest.mark.parametrize(("steps_per_dispatch", "plain"), [(1, False), (3, True)])
def test_the_hand_written_step_computes_the_same(steps_per_dispatch: int, plain: bool) -> None:
    assert gap_by_hand(steps_per_dispatch, plain) < SAME


@pytest.mark.large
def test_a_slightly_wrong_learning_rate_by_hand_shows() -> None:
    assert gap_by_hand(1, lr=1e-3 * (1 + 1e-6)) > 100 * SAME


def test_the_hand_written_loop_sees_every_example_once_per_epoch() -> None:
    for plain, steps in ((False, 1), (False, 3), (True, 1), (True, 3)):
        by_hand = HandWritten(
            optim.sgd(), jax.devices("cpu")[: 1 if plain else 2], plain=plain, steps_per_dispatch=steps, batch_size=8
        )
        seen = np.concatenate([indices.ravel() for indices in by_hand._indices(0, 46)])
        np.testing.assert_array_equal(np.sort(seen), np.arange(46))


def test_all_reduces_in_loops_count_once_per_pass() -> None:
    def program(x: jax.Array) -> jax.Array:
        x = lax.psum(x, "r")  # 5 floats, once

        def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.sin(lax.psum(jnp.outer(carry, carry), "r")[0]), None  # 25 floats, 7 times

        return lax.scan(body, x, None, length=7)[0]

    mapped = jax.pmap(program, "r", devices=jax.devices("cpu")[:2])
    messages = all_reduces(mapped.lower(np.ones((2, 5), np.float32)).compile().as_text())
    assert (messages.count, messages.bytes) == (8, 4 * (5 + 7 * 25))


def test_a_program_without_all_reduces_has_none() -> None:
    text = jax.jit(lambda x: lax.fori_loop(0, 3, lambda _, y: y + 1, x)).lower(np.ones(3)).compile().as_text()
    assert all_reduces(text).count == 0


HLO = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], bf16[2,3])) -> (s32[], bf16[2,3]) {
  %started = (f32[4]{0}, /*index=1*/bf16[2,3]{1,0}) all-reduce-start(%x, %y), to_apply=%add
  ROOT %done = (f32[4]{0}, bf16[2,3]{1,0}) all-reduce-done(%started)
}

ENTRY %main (p: f32[2]) -> f32[2] {
  %flags = pred[3]{0} all-reduce(%q), to_apply=%add
  ROOT %while.1 = (s32[], bf16[2,3]) while(%t), condition=%cond, body=%bodyTRIPS
}
"""


def test_asynchronous_all_reduces_of_all_dtypes_count() -> None:
    messages = all_reduces(HLO.replace("TRIPS", ', backend_config={"known_trip_count":{"n":"6"}}'))
    assert (messages.count, messages.bytes) == (1 + 6, 3 + 6 * (4 * 4 + 6 * 2))


@pytest.mark.parametrize(("text", "message"), [(HLO.replace("TRIPS", ""), "unknown length"), ("", "no compiled")])
def test_loops_of_unknown_length_and_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        all_reduces(text)


@pytest.mark.large
def test_saved_records_have_the_same_form(ran: dict[str, Any]) -> None:
    saved = sorted((Path(steps_per_second.__file__).parent / "results").glob("*.json"))
    assert saved
    for path in saved:
        record = json.loads(path.read_text())
        assert record.keys() == ran.keys()
        assert report.text(record)
