"""PowerSGD against torch's hooks on gloo, in every stage of every step, from whole to compressed gradients."""

from typing import Any

import pytest

from jaxddp.comm_hooks import CommHook, batched_powerSGD, powerSGD
from jaxddp.parity.torch_side.pool import TorchPool
from tests.support.cases import even_case
from tests.support.trajectories import check_differs, check_equal, compare, run_in_both

TOLERANCE = 1e-12  # float64; measured: up to 3e-15, in the convnet on 4 replicas 2e-14
FAULT = 1e-2  # smallest difference, of the gradient's norm, that a wrong hook must cause; measured: 0.04
START = 3


def case_of(hook: str, model: str = "mlp", world_size: int = 2, **options: Any) -> Any:
    options = {"comm_hook": hook, "start_power_sgd_iter": START, "momentum": 0.9} | options
    if hook == "powerSGD":
        options = {"min_compression_rate": 1.0} | options  # the matrices are small
    return even_case(model, "sgd", world_size, steps=8, **options)


@pytest.mark.one_in(24)
@pytest.mark.parametrize("warm_start", [True, False])
@pytest.mark.parametrize("use_error_feedback", [True, False])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("hook", ["powerSGD", "batched_powerSGD"])
def test_all_options_equal_torchs(
    hook: str, world_size: int, rank: int, use_error_feedback: bool, warm_start: bool, pool: TorchPool
) -> None:
    memory = {"use_error_feedback": use_error_feedback, "warm_start": warm_start}
    case = case_of(hook, "mlp", world_size, matrix_approximation_rank=rank, **memory)
    check_equal(run_in_both(case, pool), TOLERANCE)


@pytest.mark.large
@pytest.mark.parametrize("hook", ["powerSGD", "batched_powerSGD"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("model", ["char_mlp", "convnet"])
def test_every_kind_of_layer_equals_torchs(hook: str, model: str, world_size: int, pool: TorchPool) -> None:
    check_equal(run_in_both(case_of(hook, model, world_size, matrix_approximation_rank=2), pool), TOLERANCE)


# torch draws random factors shape by shape, not layer by layer: two matrices of one shape have another between them.
SHAPES = {"hidden_sizes": (8, 6, 8, 6), "freeze": ("layers.4.*",)}


@pytest.mark.large
@pytest.mark.parametrize(
    ("hook", "options"),
    [("powerSGD", SHAPES), ("batched_powerSGD", {"start_power_sgd_iter": 1})],
    ids=["shapes", "start"],
)
def test_cold_starts_equal_torchs(hook: str, options: dict[str, Any], pool: TorchPool) -> None:
    cold = {"matrix_approximation_rank": 3, "warm_start": False, "use_error_feedback": hook == "powerSGD"}
    check_equal(run_in_both(case_of(hook, **cold, **options), pool), TOLERANCE)


RIGHT = {"matrix_approximation_rank": 2, "start_power_sgd_iter": START, "order": ("fc.bias", "fc.kernel")}
OF_TENSORS = RIGHT | {"min_compression_rate": 1.0}


@pytest.mark.one_in(6, first=3)
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
    ids=["nothing wrong", "no error feedback", "other rank", "one step late", "cold start", "other order"],
)
def test_a_wrong_hook_is_detected_in_its_first_step(
    hook: str, wrong: CommHook, step: int | None, pool: TorchPool
) -> None:
    runs = run_in_both(case_of(hook, "linear", matrix_approximation_rank=2), pool, comm_hook=wrong)
    comparison = compare(*runs, TOLERANCE)
    if step is None:
        assert comparison.equal, comparison
    else:
        check_differs(comparison, "gradients", FAULT, step)
        assert comparison.first[1].value > FAULT, comparison
