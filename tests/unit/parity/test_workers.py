"""After an error, jax's process is kept if it only raised, and replaced if it died or hangs; torch's may end alone."""

from typing import Any

import pytest

from jaxddp.parity.processes import ChildError
from jaxddp.parity.workers import Workers


class Started:
    """Stand-in for the processes of a side that counts how often they are ended."""

    ended = 0

    def end(self, patience: float = 0.0) -> None:
        self.ended += 1


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (ChildError("jax", "step 2", "division by zero", "Traceback ..."), 0),
        (ChildError("jax", "step 2", "died of SIGKILL"), 1),
        (ChildError("jax", "step 2", "no answer for 300 s"), 1),
        (ChildError("torch rank 1", "step 2", "died of SIGKILL"), 0),
    ],
    ids=["raised", "died", "hangs", "torch died"],
)
def test_only_a_process_that_died_or_hangs_is_ended(error: ChildError, ended: int) -> None:
    workers: Any = Workers(1)
    workers._jax = child = Started()
    workers.end_after(error)
    assert child.ended == ended
    assert workers._jax is (None if ended else child)


def test_an_error_before_the_first_job_of_jax_ends_nothing() -> None:
    workers: Any = Workers(1)
    workers.end_after(ChildError("jax", "start", "died of SIGKILL"))
    assert workers._jax is None


@pytest.mark.parametrize("first", ["jax", "torch"])
def test_both_sides_start_at_the_first_job_of_either(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    side = type("Side", (Started,), {"__enter__": lambda self: self, "alive": True})
    for name in ("JaxChild", "TorchPool"):
        monkeypatch.setattr(f"jaxddp.parity.workers.{name}", lambda *_, name=name: started.append(name) or side())
    workers = Workers(1)
    getattr(workers, first)
    assert sorted(started) == ["JaxChild", "TorchPool"]
    workers.end_torch()
    assert workers.jax and len(started) == 2  # jax alone stays so: of a large model one side runs at a time


def test_torchs_ranks_end_alone() -> None:
    workers: Any = Workers(1)
    workers._jax, workers._torch = jax, torch = Started(), Started()
    workers.end_torch()
    assert (jax.ended, torch.ended) == (0, 1) and workers._jax is jax and workers._torch is None
