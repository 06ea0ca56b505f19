"""Faults planted on the JAX side, each of which the comparison with torch must detect."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.collectives import all_reduce, all_reduce_mean
from jaxddp.errors import TrainingError
from jaxddp.parity.processes import ChildError
from jaxddp.parity.torch_side.pool import TorchPool
from tests.support.cases import even_case
from tests.support.trajectories import check_differs, compare, on_one_replica, run_jax, whole_batch

TOLERANCE = 1e-12
WORLD_SIZE = 4


def swap_ranks(batch: MicroBatches) -> MicroBatches:
    return MicroBatches(None, {name: np.roll(array, 1, axis=0) for name, array in batch.last.items()})


def config_of(case, **changes):
    return dataclasses.replace(case, config=dataclasses.replace(case.config, **changes))


def summed(case, weights):
    return run_jax(case, weights, comm_hook=all_reduce)


def not_synchronised(case, weights):
    return run_jax(case, weights, comm_hook=lambda gradients: gradients)


def averaged_twice(case, weights):
    def hook(gradients):
        return jax.tree.map(lambda g: g / WORLD_SIZE, all_reduce_mean(gradients))

    return run_jax(case, weights, comm_hook=hook)


def wrong_rate(case, weights):
    return run_jax(config_of(case, lr=case.config.lr * (1 + 1e-9)), weights)


def wrong_decay(case, weights):
    return run_jax(config_of(case, weight_decay=case.config.weight_decay * (1 + 1e-7)), weights)


def ranks_data_swapped(case, weights):
    return run_jax(case, weights, batches=map(swap_ranks, case.batches()))


def clipped_at_another_norm(case, weights):
    return run_jax(config_of(case, clip_grad_norm=0.1), weights)


def rounded_on_the_wire(case, weights):
    def hook(gradients):
        half = jax.tree.map(lambda g: g.astype(jax.numpy.bfloat16), gradients)
        return jax.tree.map(lambda mean, g: mean.astype(g.dtype), all_reduce_mean(half), gradients)

    return run_jax(case, weights, comm_hook=hook)


# Fault, the stage that must differ first, and the smallest residual there. [measured]
CONTROLS = [
    (summed, "gradients", 1.0),  # [5.0]
    (not_synchronised, "gradients", 0.1),  # [3.0]
    (averaged_twice, "gradients", 0.1),  # [0.8]
    (wrong_rate, "params", 1e-10),  # [6e-10]
    (wrong_decay, "params", 1e-11),  # [2e-8]
    (ranks_data_swapped, "local_loss", 1e-2),  # [0.2]
    (clipped_at_another_norm, "clipped_gradients", 0.1),  # [0.7]
    (rounded_on_the_wire, "gradients", 1e-5),  # [3e-3]
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("fault", "stage", "least"), CONTROLS, ids=lambda x: getattr(x, "__name__", None))
def test_a_planted_fault_is_detected_in_its_stage(fault, stage, least, pool):
    case = even_case("mlp", world_size=WORLD_SIZE, momentum=0.9)
    weights = case.initial_weights()
    comparison = compare(fault(case, weights), pool.run(case, weights), TOLERANCE)
    check_differs(comparison, stage, least)


def test_a_mean_of_means_on_an_uneven_batch_is_detected(pool):
    """jaxddp takes the mean of means, torch the mean over all labels; replicas have unequal numbers of labels."""
    case = even_case("mlp", world_size=WORLD_SIZE, ignored_labels=0.4)
    weights = case.initial_weights()
    by_labels = pool.run(config_of(case, loss_normalization="global"), weights)
    comparison = compare(run_jax(case, weights), by_labels, TOLERANCE)
    assert comparison.first is not None and comparison.first[0] == "local_loss", comparison
    assert comparison.worst["gradients"].value > 1e-2, comparison  # [0.5]


def test_local_batch_norm_in_place_of_synchronised_is_detected(pool):
    case = even_case("char_mlp", world_size=WORLD_SIZE)
    weights = case.initial_weights()
    whole = pool.run(on_one_replica(case), weights, batches=map(whole_batch, case.batches()))
    comparison = compare(run_jax(case, weights), whole, TOLERANCE, ("gradients", "params", "buffers"))
    check_differs(comparison, "gradients", 1e-2)  # [0.7]


def test_a_killed_rank_raises_and_leaves_no_process_behind():
    case = even_case("mlp", world_size=2, steps=1)
    with TorchPool(2) as small_pool:
        processes = [rank._process for rank in small_pool._ranks]
        processes[1].kill()
        with pytest.raises(TrainingError, match="torch rank 1: starting: died of SIGKILL"):
            small_pool.run(case, case.initial_weights())
        assert not any(process.is_alive() for process in processes)


def test_a_failing_rank_reports_its_exception():
    case = even_case("mlp", world_size=1, steps=1)
    message = "torch rank 0: torch_model: mlp sgd: KeyError: .*left over: fc.nonsense"
    with TorchPool(1) as small_pool, pytest.raises(ChildError, match=message) as caught:
        small_pool.run(case, {"fc.nonsense": np.zeros(3)})
    assert "fc.nonsense" in caught.value.trace
