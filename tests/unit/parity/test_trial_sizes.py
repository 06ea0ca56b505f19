"""Differences of trials: numbers that count the run's examples or replicas, and errors of small gradients."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from jaxddp.parity.coverage import Trial
from jaxddp.parity.port.variants import Variant
from jaxddp.parity.trials.runs import Tried, without_noise
from jaxddp.parity.trials.sizes import counted


def test_a_size_that_the_trial_has_too_explains_no_difference() -> None:
    trial = Trial("batch", "with one example less")
    tried = Tried(Variant(trial), trial, {}, 0, (), factor=1.0, sizes={7: "the batch"}, count=2)
    runs = SimpleNamespace(summary=SimpleNamespace(sizes={8: "the batch"}), case=SimpleNamespace(world_size=2))
    assert counted(cast(Any, runs), cast(Any, None), tried) is None  # it asks no worker for lines


def test_an_update_may_be_as_wrong_as_its_gradient_is_rounded() -> None:
    gradients, update = np.array([1.0, 1e-9, 1e-17]), np.array([1e-2, 1e-4, 1e-4])
    torch = {"gradients": {"w": gradients}, "update": {"w": update}}

    def residual(*errors: float) -> float:
        return without_noise([torch], {"update": {"w": update * (1 + np.array(errors))}}, {})["w"]

    assert residual(0, 1e-6, 1.5) == 0  # the last gradient is nothing but rounding
    assert residual(0, 1e-3, 0) > 1e-6 and residual(1e-9, 0, 0) > 1e-10
