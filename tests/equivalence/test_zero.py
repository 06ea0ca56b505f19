"""Sharded optimizer state against torch's ZeroRedundancyOptimizer, and against jaxddp without sharding."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
from jax import lax

from jaxddp.config.choices import OPTIMIZERS
from jaxddp.distributed import collectives
from jaxddp.parity.jax_side.checked_step import forget_programs
from jaxddp.parity.torch_side.pool import TorchPool
from jaxddp.step import zero
from jaxddp.step.replicated import Replicated
from jaxddp.step.zero import Sharded
from tests.support.cases import even_case
from tests.support.trajectories import check_differs, check_equal, compare, run_in_both, run_jax

TOLERANCE = 1e-12  # float64; measured: up to 4.5e-15, with one_cycle on four replicas 3.1e-14
FAULT = 1e-2  # smallest difference of the stage that a planted fault must cause; measured: 0.4
FEATURES: dict[str, dict[str, Any]] = {
    "accumulation, clipping, global normalization": {
        "clip_grad_norm": 0.1,
        "accumulation_steps": 2,
        "loss_normalization": "global",
        "ignored_labels": 0.3,
        "global_batch_size": 64,
    },
    "clipping": {"clip_grad_norm": 0.1},
    "one cycle": {"schedule": "one_cycle", "lr": 0.1, "momentum": None},
    "moving average": {"ema_decay": 0.9},
    "frozen layer": {"freeze": ("layers.1.*",)},
}


def case_of(optimizer: str = "sgd", world_size: int = 2, **options: Any) -> Any:
    momentum = 0.9 if optimizer == "sgd" else None
    defaults = {"shard_optimizer": True, "momentum": momentum, "steps": 6}
    return even_case("mlp", optimizer, world_size, **(defaults | options))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_takes_torchs_steps(optimizer: str, pool: TorchPool) -> None:
    check_equal(run_in_both(case_of(optimizer), pool), TOLERANCE)


@pytest.mark.one_in(11)
@pytest.mark.parametrize(
    ("feature", "world_size"), [(name, size) for name in FEATURES for size in (2, 4)] + [("bf16", 2)]
)
def test_features_around_the_sharded_update_equal_torchs(feature: str, world_size: int, pool: TorchPool) -> None:
    case = case_of(world_size=world_size, **FEATURES.get(feature, {"comm_hook": "bf16_compress"}))
    jax_run, torch_run = run_in_both(case, pool)
    check_equal((jax_run, torch_run), TOLERANCE)
    assert not any(record["spread"] for record in jax_run.records)  # all replicas are equal bit for bit


@pytest.mark.one_in(2)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_sharded_optimizer_equals_the_whole_one(world_size: int) -> None:
    case, whole = (case_of("adam", world_size, shard_optimizer=shard, clip_grad_norm=0.1) for shard in (True, False))
    weights = case.initial_weights()
    check_equal((run_jax(case, weights), run_jax(whole, weights)), TOLERANCE)


# ---- controls


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Any], None]]:
    """Return a function that replaces what `jaxddp.step.zero` calls; forget compiled programs around the test."""
    forget_programs()
    yield lambda name, fault: monkeypatch.setattr(Sharded if hasattr(Sharded, name) else zero, name, fault)
    forget_programs()


def of_the_other(own: Any) -> Any:
    """Return the other replica's value; there are two replicas."""
    return jax.tree.map(lambda x: lax.ppermute(x, collectives.AXIS_NAME, [(0, 1), (1, 0)]), own)


FAULTS: dict[str, tuple[str, Any, str]] = {
    "another replica's slice of the parameters": (
        "part",
        lambda self, tree, part=Sharded.part: of_the_other(part(self, tree)),
        "params",
    ),
    "slices in another order": ("all_gather", lambda own: collectives.all_gather(of_the_other(own)), "gradients"),
    "norm of one slice": ("clip", Replicated.clip, "clipped_gradients"),
    "sum instead of mean": ("reduce_scatter", lambda tree, op: collectives.reduce_scatter(tree), "gradients"),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_detected(name: str, plant: Callable[[str, Any], None], pool: TorchPool) -> None:
    function, fault, stage = FAULTS[name]
    plant(function, fault)
    runs = run_in_both(case_of("adagrad", clip_grad_norm=0.1), pool)
    check_differs(compare(*runs, TOLERANCE), stage, FAULT, step=1)
