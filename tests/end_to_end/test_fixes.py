"""The fix that a report gives is applied to a port with the fault, which is then equal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxddp.parity.catalogue import FAULTS
from jaxddp.parity.checking import check
from jaxddp.parity.report.report import Report
from jaxddp.parity.workers import Workers
from tests.end_to_end.fixes import data, model, optimizer, reduction
from tests.end_to_end.fixes.fix import HOLE, Fix
from tests.end_to_end.fixes.model import BATCH_NORM
from tests.support.checks import Checked
from tests.support.small_port import write

FIXES = (*reduction.FIXES, *optimizer.FIXES, *data.FIXES, *model.FIXES)
# Faults that have no row, and why.
NOT_APPLIED = {
    "check_vma": "a port's step runs under pmap, where no shard_map can stand; its two fixes are applied below",
    "decay_rounded_away": "its fix is to change nothing",
}


def test_every_fault_of_the_catalogue_has_a_fix_that_is_applied() -> None:
    applied = {fix.fault for fix in FIXES}
    assert applied | NOT_APPLIED.keys() == FAULTS.keys()
    assert not applied & NOT_APPLIED.keys()


@pytest.mark.parametrize("fix", [pytest.param(fix, id=fix.fault) for fix in FIXES])
def test_the_text_of_a_fix_has_the_code_that_is_applied(fix: Fix) -> None:
    assert fix.piece in fix.text
    assert fix.sentence or fix.piece in fix.filling
    assert [HOLE in new for _, new in fix.changes] + [HOLE in fix.more] != [False] * (len(fix.changes) + 1)


@pytest.mark.large
@pytest.mark.parametrize("fix", [pytest.param(fix, id=fix.fault) for fix in FIXES])
def test_a_fix_makes_the_port_equal(fix: Fix, tmp_path: Path, workers: Workers) -> None:
    """Equal in the run: the number of tokens of one fix is that of the run's batches and replicas."""

    def checked(code: str) -> Report:
        changes, more = fix.filled(code)
        port = write(tmp_path, *changes, more=more)
        return check(port, world_size=fix.world_size, steps=fix.steps, workers=workers, numerics=False, quick=True)

    report = checked(fix.wrong)
    assert report.verdict == "different" and not report.problems, str(report)
    for found in report.differences:
        assert found.cause is not None and fix.fault in found.cause.names, str(report)
        assert {*found.cause.names} <= {fix.fault, *fix.also}, str(report)
        assert fix.piece in found.cause.fixes[found.cause.names.index(fix.fault)], str(report)
    report = checked(fix.filling)
    # A cosine of torch's rises again after its end, and one of optax does not.
    assert report.verdict == "equal" or {x.stage for x in report.beyond} == {"rates"}, str(report)


@pytest.mark.large
def test_the_fix_of_the_momentum_of_flaxs_own_batch_norm_leaves_its_variance(checked: Checked) -> None:
    def names(code: str) -> list[tuple[str, ...]]:
        changes, _ = Fix("batch_norm_momentum", "", "", BATCH_NORM).filled(code)
        return [found.cause.names for found in checked(*changes).differences if found.cause is not None]

    momentum = "momentum=0.9"
    assert f"use {momentum} in nnx.BatchNorm" in FAULTS["batch_norm_momentum"].fix
    assert sorted(names("nnx.BatchNorm(5, rngs=rngs)")) == [("batch_norm_momentum",), ("biased_variance",)]
    assert names(f"nnx.BatchNorm(5, {momentum}, rngs=rngs)") == [("biased_variance",)]


def mean_of_gradients(loss: Any, params: Any, axis_name: str) -> Any:
    return jax.lax.pmean(jax.grad(loss)(params), axis_name)


def gradients_of_mean(loss: Any, params: Any, axis_name: str) -> Any:
    return jax.grad(lambda params: jax.lax.pmean(loss(params), axis_name))(params)


@pytest.mark.parametrize(
    ("gradients_of", "check_vma", "factor"),
    [(mean_of_gradients, True, 4.0), (mean_of_gradients, False, 1.0), (gradients_of_mean, True, 1.0)],
    ids=["fault", "check_vma=False", "mean of the losses"],
)
def test_the_fixes_of_check_vma_give_the_mean(gradients_of: Callable[..., Any], check_vma: bool, factor: float) -> None:
    for piece in (
        "pass check_vma=False to shard_map",
        "gradients = jax.lax.pmean(gradients, axis_name)",
        "jax.grad(lambda params: jax.lax.pmean(loss(params), axis_name))",
    ):
        assert piece in FAULTS["check_vma"].fix
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)

    def of_replica(params: jax.Array, x: jax.Array) -> Any:
        return gradients_of(lambda params: jnp.square(x @ params).mean(), params, "replica")

    everywhere, parts = PartitionSpec(), PartitionSpec("replica")
    mesh = Mesh(np.array(jax.devices()[:4]), ("replica",))
    step = jax.shard_map(of_replica, mesh=mesh, in_specs=(everywhere, parts), out_specs=everywhere, check_vma=check_vma)
    mean = 2 * x.T @ x.sum(1) / 8
    np.testing.assert_allclose(step(jnp.ones(3), jnp.asarray(x)), factor * mean, rtol=1e-5)  # measured: 2e-7, float32
