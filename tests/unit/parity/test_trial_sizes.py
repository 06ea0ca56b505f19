"""Numbers of a port that count the run's examples or replicas."""

from types import SimpleNamespace
from typing import Any, cast

from jaxddp.parity.coverage import Trial
from jaxddp.parity.port.variants import Variant
from jaxddp.parity.trials.runs import Tried
from jaxddp.parity.trials.sizes import counted


def test_a_size_that_the_trial_has_too_explains_no_difference() -> None:
    trial = Trial("batch", "with one example less")
    tried = Tried(Variant(trial), trial, {}, 0, (), factor=1.0, sizes={7: "the batch"}, count=2)
    runs = SimpleNamespace(summary=SimpleNamespace(sizes={8: "the batch"}), case=SimpleNamespace(world_size=2))
    assert counted(cast(Any, runs), cast(Any, None), tried) is None  # it asks no worker for lines
