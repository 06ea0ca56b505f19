"""PowerSGD against torch's hooks on gloo: every stage of every step, from whole gradients into compressed ones."""

from typing import Any

import pytest

from jaxddp.comm_hooks import CommHook, batched_powerSGD, powerSGD
from jaxddp.parity.torch_side.pool import TorchPool
from tests.support.cases import even_case
from tests.support.trajectories import compare, run_jax

TOLERANCE = 1e-12  # float64; measured: up to 3e-15, in the convnet on 4 replicas 2e-14
FAULT = 1e-2  # of the gradient's norm, with a planted fault, at least; measured: 0.04
START = 3


def case(hook: str, model: str = "mlp", world_size: int = 2, **options: Any) -> Any:
    options = {"comm_hook": hook, "start_power_sgd_iter": START, "momentum": 0.9} | options
    if hook == "powerSGD":
        options = {"min_compression_rate": 1.0} | options  # the matrices are small
    return even_case(model, "sgd", world_size, steps=8, **options)


def assert_equal(asked: Any, pool: TorchPool) -> None:
    weights = asked.initial_weights()
    comparison = compare(run_jax(asked, weights), pool.run(asked, weights), TOLERANCE)
    assert comparison.equal, comparison


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("hook", "world_size", "rank", "memory"),
    [
        ("powerSGD", 4, 1, {}),
        ("powerSGD", 2, 2, {"use_error_feedback": False}),
        ("batched_powerSGD", 4, 2, {}),
        ("batched_powerSGD", 2, 3, {"use_error_feedback": False, "warm_start": False, "start_power_sgd_iter": 1}),
    ],
)
def test_the_steps_are_torchs(hook: str, world_size: int, rank: int, memory: dict[str, Any], pool: TorchPool) -> None:
    assert_equal(case(hook, "linear", world_size, matrix_approximation_rank=rank, **memory), pool)


@pytest.mark.large
def test_they_are_with_matrices_of_one_shape_that_another_stands_between(pool: TorchPool) -> None:
    """torch draws for those of one shape one after the other."""
    sizes = {"hidden_sizes": (8, 6, 8, 6), "freeze": ("layers.4.*",)}
    assert_equal(case("powerSGD", matrix_approximation_rank=3, warm_start=False, **sizes), pool)


@pytest.mark.large
@pytest.mark.parametrize("warm_start", [True, False])
@pytest.mark.parametrize("use_error_feedback", [True, False])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("hook", ["powerSGD", "batched_powerSGD"])
def test_they_are_with_all_options(
    hook: str, world_size: int, rank: int, use_error_feedback: bool, warm_start: bool, pool: TorchPool
) -> None:
    memory = {"use_error_feedback": use_error_feedback, "warm_start": warm_start}
    assert_equal(case(hook, "mlp", world_size, matrix_approximation_rank=rank, **memory), pool)


@pytest.mark.large
@pytest.mark.parametrize("hook", ["powerSGD", "batched_powerSGD"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("model", ["char_mlp", "convnet"])
def test_they_are_with_every_kind_of_layer(hook: str, model: str, world_size: int, pool: TorchPool) -> None:
    assert_equal(case(hook, model, world_size, matrix_approximation_rank=2), pool)


RIGHT = {"matrix_approximation_rank": 2, "start_power_sgd_iter": START, "order": ("fc.bias", "fc.kernel")}
OF_TENSORS = RIGHT | {"min_compression_rate": 1.0}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("hook", "wrong", "step"),
    [
        ("powerSGD", powerSGD(**OF_TENSORS), None),
        ("powerSGD", powerSGD(**OF_TENSORS, use_error_feedback=False), START + 2),
        ("powerSGD", powerSGD(**OF_TENSORS | {"matrix_approximation_rank": 1}), START + 1),
        ("powerSGD", powerSGD(**OF_TENSORS | {"start_power_sgd_iter": START + 1}), START + 1),
        ("powerSGD", powerSGD(**OF_TENSORS, warm_start=False), START + 2),
        ("batched_powerSGD", batched_powerSGD(**RIGHT | {"order": ("fc.kernel", "fc.bias")}), START + 1),
    ],
    ids=["nothing wrong", "no error feedback", "rank", "a step late", "cold start", "another order"],
)
def test_another_hook_would_be_noticed_at_once(hook: str, wrong: CommHook, step: int | None, pool: TorchPool) -> None:
    asked = case(hook, "linear", matrix_approximation_rank=2)
    weights = asked.initial_weights()
    comparison = compare(run_jax(asked, weights, comm_hook=wrong), pool.run(asked, weights), TOLERANCE)
    if step is None:
        assert comparison.equal, comparison
    else:
        assert comparison.first is not None and comparison.first[0] == "gradients"
        assert comparison.first[1].step == step
        assert comparison.first[1].value > FAULT, comparison
