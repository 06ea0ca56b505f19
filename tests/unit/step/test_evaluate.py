"""Evaluation: every example counts exactly once, for any number of examples and devices."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxddp import optim
from jaxddp.data.torch_rng import Generator
from jaxddp.data_parallel import DistributedDataParallel
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError
from jaxddp.nn import layers
from jaxddp.nn.losses import IGNORE_INDEX
from jaxddp.step import evaluate
from jaxddp.step.evaluate import equal_places, padded_places

# Relative, of sums in float32; measured: 8.7e-8. Counting a padded example changes a sum by 1 % or more.
TOLERANCE = 1e-6
BATCH_SIZE = 3
FEATURES, CLASSES = 4, 3

Arrays = dict[str, np.ndarray]


class Net(nnx.Module):
    """BatchNorm and a linear layer."""

    def __init__(self) -> None:
        self.bn = layers.BatchNorm(FEATURES)
        self.fc = layers.Linear(FEATURES, CLASSES, generator=Generator(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(self.bn(x))


def examples(size: int) -> Arrays:
    rng = np.random.default_rng(size)
    y = rng.integers(0, CLASSES, size)
    y[3::4] = IGNORE_INDEX
    return {"x": rng.normal(2.0, 3.0, size=(size, FEATURES)).astype("float32"), "y": y}


@functools.cache
def trained(world_size: int) -> tuple[DistributedDataParallel, Any]:
    """Return a trainer and a state whose running statistics are neither the initial ones nor those of a batch."""
    ddp = DistributedDataParallel(Net(), optim.sgd(), replicas=Replicas(jax.devices()[:world_size]))
    buffers = {"bn.mean": np.array([1, 2, 3, 4], "float32"), "bn.var": np.array([4, 9, 1, 2], "float32")}
    return ddp, ddp.init(buffers={**ddp.functional.buffers, **buffers})


def by_hand(arrays: Arrays, params: Arrays, buffers: Arrays) -> dict[str, float]:
    """Compute the sums example by example in float64."""
    sums = {"loss": 0.0, "count": 0, "accuracy": 0}
    for x, y in zip(arrays["x"].astype("float64"), arrays["y"], strict=True):
        if y != IGNORE_INDEX:
            x = (x - buffers["bn.mean"]) / np.sqrt(buffers["bn.var"] + 1e-5) * params["bn.scale"] + params["bn.bias"]
            logits = x @ params["fc.kernel"] + params["fc.bias"]
            sums["loss"] += np.log(np.exp(logits).sum()) - logits[y]
            sums["count"] += 1
            sums["accuracy"] += int(logits.argmax() == y)
    return sums


def check(world_size: int, size: int) -> None:
    ddp, state = trained(world_size)
    params, buffers = jax.device_get((state.params, state.buffers))
    expected = by_hand(examples(size), params, buffers)
    sums = jax.device_get(ddp.evaluate_placed(state, ddp.place(examples(size), BATCH_SIZE)))
    assert sums.keys() == expected.keys()
    assert sums["count"] == expected["count"]
    assert sums["accuracy"] == expected["accuracy"]
    assert sums["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE)
    for name, value in jax.device_get(state.buffers).items():
        np.testing.assert_array_equal(value, buffers[name], name)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_every_example_counts_once(world_size: int) -> None:
    for size in {1, world_size - 1, world_size, world_size + 1, 5 * world_size - 1, 5 * world_size + 1} - {0}:
        check(world_size, size)


def test_counting_the_padding_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_valid(*args: Any) -> list[evaluate.Places]:
        ((indices, valid),) = padded_places(*args)
        return [(indices, np.ones_like(valid))]

    monkeypatch.setattr(evaluate, "padded_places", all_valid)
    check(4, 4)  # passes: there is no padding
    with pytest.raises(AssertionError):
        check(4, 5)


def test_using_the_statistics_of_the_batch_is_caught() -> None:
    ddp, state = trained(2)
    arrays = examples(9)
    of_batch = {"bn.mean": arrays["x"].mean(axis=0), "bn.var": arrays["x"].var(axis=0)}
    loss, count = (by_hand(arrays, jax.device_get(state.params), of_batch)[name] for name in ("loss", "count"))
    assert abs(ddp.evaluate(state, arrays)["loss"] / (loss / count) - 1) > 0.01


def test_means_do_not_depend_on_devices_or_batch_size() -> None:
    arrays = examples(21)
    one, two = ([ddp.evaluate(state, arrays, batch_size=b) for b in (2, 256)] for ddp, state in map(trained, (1, 2)))
    for means in [*one, *two]:
        assert means == pytest.approx(one[0], rel=TOLERANCE)
    assert list(one[0]) == ["loss", "accuracy"]


def test_an_infinite_loss_is_reported_unless_its_label_is_ignored() -> None:
    ddp, state = trained(2)
    arrays = examples(3)
    arrays["x"][2] = np.inf
    assert not np.isfinite(ddp.evaluate(state, arrays)["loss"])
    arrays["y"][2] = IGNORE_INDEX
    assert np.isfinite(ddp.evaluate(state, arrays)["loss"])


def of_mean(model: Any, batch: Any) -> jax.Array:
    """Return a mean of the batch, which cannot leave out an example."""
    return (model(batch["x"]) ** 2).mean()


@pytest.mark.parametrize("size", [1, 2, 7, 12, 13])
def test_of_a_mean_every_example_counts_once_too(size: int) -> None:
    ddp = DistributedDataParallel(Net(), optim.sgd(), of_mean, replicas=Replicas(jax.devices()[:2]))
    state, arrays = ddp.init(), examples(size)
    alone = [ddp.evaluate(state, {"x": arrays["x"][i : i + 1]})["loss"] for i in range(size)]
    assert ddp.evaluate(state, arrays, batch_size=BATCH_SIZE)["loss"] == pytest.approx(np.mean(alone), rel=TOLERANCE)


def test_weighting_a_shared_example_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(*args: Any) -> list[evaluate.Places]:
        return [(indices, np.ones_like(valid)) for indices, valid in equal_places(*args)]

    monkeypatch.setattr(evaluate, "equal_places", doubled)
    with pytest.raises(AssertionError):
        test_of_a_mean_every_example_counts_once_too(7)


def test_a_set_that_does_not_stay_on_the_devices_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp, state = trained(2)
    kept = ddp.place(examples(21), BATCH_SIZE)
    monkeypatch.setattr(evaluate, "KEPT_BYTES", 100)
    monkeypatch.setattr(evaluate, "PART_BYTES", 200)
    read_anew = ddp.place(examples(21), BATCH_SIZE)
    assert len([*read_anew]) > len([*kept]) == 1
    expected = {name: float(x) for name, x in ddp.evaluate_placed(state, kept).items()}
    for _ in range(2):
        sums = {name: float(x) for name, x in ddp.evaluate_placed(state, read_anew).items()}
        assert sums == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("size", [1, 5, 6, 7])
def test_padding_repeats_the_first_example_with_no_weight(size: int) -> None:
    ((indices, valid),) = padded_places(size, world_size=3, batch_size=2)
    assert indices[valid == 1].tolist() == list(range(size))
    assert set(indices[valid == 0].tolist()) <= {0}
    assert indices.shape == (3, -(-size // 6), 2)


@pytest.mark.parametrize(("sizes", "message"), [((0, 0), "has no examples"), ((3, 2), "arrays of different lengths")])
def test_empty_or_unequal_arrays_are_refused(sizes: tuple[int, int], message: str) -> None:
    ddp, _ = trained(2)
    with pytest.raises(InputError, match=rf"^evaluation data: {message}"):
        ddp.place({name: np.zeros(size) for name, size in zip("xy", sizes, strict=True)})
