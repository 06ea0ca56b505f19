"""N devices equal one device with N times the batch, in jaxddp's pmap and in torch DDP.

This holds for every model without BatchNorm, and for models with BatchNorm only if BatchNorm is synchronised.
test_controls.py has the faults that must differ.
"""

import pytest

from jaxddp.parity.case_interface import SHARED_STAGES
from tests.support.cases import small_case
from tests.support.trajectories import check_equal, on_one_replica, run_jax, whole_batch

TOLERANCE = 1e-12  # [2e-15]


def runs(case, run):
    """Run a case on its replicas, and on one replica with the same whole batches."""
    weights = case.initial_weights()
    whole = [whole_batch(batch) for batch in case.batches()]
    return run(case, weights), run(on_one_replica(case), weights, batches=whole)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model", ["linear", "mlp"])
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_8_replicas_equal_one(model, framework, pool):
    case = small_case(model, world_size=8, momentum=0.9)
    check_equal(runs(case, run_jax if framework == "jax" else pool.run), TOLERANCE, SHARED_STAGES)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model", ["char_mlp", "convnet"])
def test_synchronised_batch_norm_on_4_devices_equals_torch_on_the_whole_batch(model, pool):
    case = small_case(model, world_size=4, sync_batch_norm=True)
    weights = case.initial_weights()
    whole = [whole_batch(batch) for batch in case.batches()]
    torch_whole = pool.run(on_one_replica(case), weights, batches=whole)
    check_equal((run_jax(case, weights), torch_whole), TOLERANCE, SHARED_STAGES)


@pytest.mark.large
def test_global_normalization_equals_the_whole_batch():
    case = small_case("mlp", world_size=4, ignored_labels=0.4, loss_normalization="global")
    check_equal(runs(case, run_jax), TOLERANCE, SHARED_STAGES)
