"""Gradient averaging example: gradients are right, and claims fail for planted mistakes."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from examples.claims import Claim
from examples.gradient_averaging import in_jax, measure, steps
from examples.gradient_averaging.__main__ import Options
from examples.gradient_averaging.problem import PER_REPLICA, batch, parameters
from jaxddp import DistributedDataParallel
from jaxddp.distributed.collectives import all_reduce
from jaxddp.errors import InputError

pytestmark = pytest.mark.large


def hold(claims: list[Claim]) -> list[bool]:
    return [claim.holds for claim in claims]


@pytest.fixture(scope="module")
def in_float64() -> measure.Written:
    return measure.written("float64")


def test_gradients_by_hand_in_numpy_are_autograds(in_float64: measure.Written) -> None:
    p = {name: array.astype(np.float64) for name, array in parameters().items()}
    written = steps.backward(np, p, **batch(PER_REPLICA))
    assert measure.worst(measure.differences(written, in_float64.of_torch)) < measure.SAME["float64"]


def test_claims_fail_for_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    right = steps.backward

    def without_the_mean(xp: Any, p: Any, x: Any, y: Any) -> steps.Arrays:
        d = right(xp, p, x, y)
        return {**d, "hprebn": d["bndiff"]}  # as if BatchNorm's mean were a constant

    monkeypatch.setattr(steps, "backward", without_the_mean)
    jax.clear_caches()
    wrong = measure.written("float64")
    jax.clear_caches()
    assert hold(measure.of_written(wrong, "float64")) == [False, True, True, True]
    assert not wrong.jax["hprebn"].close and not wrong.torch["hprebn"].close and wrong.jax["embcat"].close


def test_smaller_shares_have_a_larger_error_from_batch_norm() -> None:
    few, many = measure.by_share((4, 64), 4).values()
    assert few > 0.2 > many > measure.ANOTHER_GRADIENT  # measured: 0.41, 0.08


@pytest.fixture(scope="module")
def shared() -> measure.Shared:
    return measure.shared(jax.devices("cpu")[:2], "cpu")


def test_claims_fail_for_summed_gradients(shared: measure.Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_jax, "DistributedDataParallel", partial(DistributedDataParallel, comm_hook=all_reduce))
    summed = measure.on_devices("none", 2 * PER_REPLICA, jax.devices("cpu")[:2])
    wrong = replace(shared, devices={**shared.devices, "none": summed})
    assert hold(measure.of_replicas(wrong)) == [False, True, True, False]


def test_claims_fail_without_synchronised_batch_norm(shared: measure.Shared) -> None:
    wrong = replace(shared, devices={**shared.devices, "synchronised": shared.devices["local"]})
    assert hold(measure.of_replicas(wrong)) == [True, True, False, True]


def test_bad_flags_are_one_line() -> None:
    with pytest.raises(InputError, match="--devices 1: each must be at least 2"):
        Options(devices=(1,))
    with pytest.raises(InputError, match="--platform tpu: unknown"):
        Options(platform="tpu")
