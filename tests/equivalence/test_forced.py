"""Steps that each start from torch's state: rounding does not accumulate, so one tolerance holds for all steps."""

import dataclasses

import pytest

from jaxddp.config.choices import OPTIMIZERS
from jaxddp.distributed.collectives import all_reduce
from tests.support.cases import MODELS, even_case
from tests.support.trajectories import FORCED_STAGES, compare, run_forced

TOLERANCE = 1e-12  # float64; measured: 8e-16, and 1e-14 for updates, which are differences of torch's parameters
PAIRS = sorted({(model, "adam") for model in MODELS} | {("mlp", optimizer) for optimizer in OPTIMIZERS})


def forced(case, pool, **options):
    reference = pool.run(case, case.initial_weights())
    return compare(run_forced(case, reference, **options), reference, TOLERANCE, FORCED_STAGES)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("model", "optimizer"), PAIRS)
def test_every_stage_of_every_step_equals_torchs(model, optimizer, pool):
    comparison = forced(even_case(model, optimizer, steps=8, accumulation_steps=2, clip_grad_norm=0.5), pool)
    assert comparison.equal, comparison


def test_a_fault_shows_in_its_own_stage_only(pool):
    case = even_case("mlp", "adam", steps=4)
    summed = forced(case, pool, comm_hook=all_reduce)
    assert {stage for stage, residual in summed.worst.items() if residual.value > TOLERANCE} == {
        "gradients",
        "clipped_gradients",
    }
    reference = pool.run(case, case.initial_weights())
    other_rate = dataclasses.replace(case, config=dataclasses.replace(case.config, lr=case.config.lr * 1.001))
    comparison = compare(run_forced(other_rate, reference), reference, TOLERANCE, FORCED_STAGES)
    assert {stage for stage, residual in comparison.worst.items() if residual.value > TOLERANCE} == {"update"}
    assert 5e-4 < comparison.worst["update"].value <= 1e-3  # [7e-4, of the tensor with the largest share]
