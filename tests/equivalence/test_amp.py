"""Autocast to bfloat16 and float16 against torch's, step by step from the same weights; dtypes of the program."""

import re
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxddp.distributed.replicas import Replicas
from jaxddp.parity.case_interface import Trajectory
from jaxddp.parity.cases import Case
from jaxddp.parity.compare.residuals import residuals
from jaxddp.parity.torch_side.pool import TorchPool
from tests.support.cases import even_case
from tests.support.processor import needs_float16
from tests.support.trajectories import run_forced

STAGE = "gradients"
# Largest distance from torch, relative to a gradient's norm, after all layers forward and backward.
# bfloat16, 8 significant bits; measured: 8e-4, 6e-4 and 4e-3.
BF16 = {"mlp": 0.002, "char_mlp": 0.002, "convnet": 0.01}
FP16 = 3e-4  # 11 significant bits; measured: 1e-4, 7e-5, 8e-5
# Smallest ratio of jaxddp's distance from float32 to torch's distance from float32; measured: 0.8 to 1.4.
AS_FAR_FROM_FLOAT32 = 0.6
PRODUCT = re.compile(r"stablehlo\.(?:dot_general|convolution).*: \((tensor<[^>]*>), (tensor<[^>]*>)\)")


def case_of(model: str, amp: str, **options: Any) -> Case:
    return even_case(model, "sgd", 2, steps=4, dtype="float32", amp=amp, **options)


def distance(a: Trajectory, b: Trajectory) -> float:
    """Return the median residual over all gradients and steps.

    The largest would not do: rounding may carry a ReLU's input across zero, and the gradients behind it then differ
    by 0.01 and more. Where that happens depends on the processor's instructions.
    """
    pairs = zip(a.records, b.records, strict=True)
    return float(np.median([apart for one, other in pairs for apart in residuals(one[STAGE], other[STAGE]).values()]))


def matches_torch(jax_run: Trajectory, torch_run: Trajectory, exact: Trajectory, allowed: float) -> bool:
    """Return whether a run is as close to torch's as rounding allows, and as far from float32 as torch's is."""
    far = distance(jax_run, exact) >= AS_FAR_FROM_FLOAT32 * distance(torch_run, exact)
    return distance(jax_run, torch_run) <= allowed and far


@needs_float16
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("model", "amp"),
    [
        *[("mlp", "bf16"), ("char_mlp", "fp16"), ("convnet", "fp16")],
        *[pytest.param(*pair, marks=pytest.mark.large) for pair in (("mlp", "fp16"), ("char_mlp", "bf16"))],
        pytest.param("convnet", "bf16", marks=pytest.mark.large),
    ],
)
def test_gradients_equal_torch_autocasts_up_to_rounding(model: str, amp: str, pool: TorchPool) -> None:
    case, allowed = case_of(model, amp), FP16 if amp == "fp16" else BF16[model]
    torch_run = pool.run(case, case.initial_weights())
    jax_run, exact = (run_forced(case_of(model, each), torch_run) for each in (amp, "none"))
    assert matches_torch(jax_run, torch_run, exact, allowed), (distance(jax_run, torch_run), distance(jax_run, exact))
    assert not matches_torch(exact, torch_run, exact, allowed)
    if model == "mlp":
        other = run_forced(case_of(model, "fp16" if amp == "bf16" else "bf16"), torch_run)
        assert not matches_torch(other, torch_run, exact, allowed)


def lowered(case: Case) -> Any:
    """Return the lowered program of a step, and the shapes of the state that it returns."""
    side, replicas = case.jax_side(), Replicas(jax.devices()[: case.world_size])
    step = side.replica_step
    state = replicas.start(step.init(*side.from_torch(case.initial_weights())), step.axes)
    mapped = replicas.map(lambda *given: step(*given)[0], (step.axes, 0), step.axes)
    batch = replicas.shard(next(case.batches()))
    return mapped.lower(state, batch).as_text(), jax.eval_shape(mapped, state, batch)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("model", ["mlp", "char_mlp", "convnet"])
@pytest.mark.parametrize(("amp", "bits"), [("bf16", "bf16"), ("fp16", "f16"), ("none", "f32")])
def test_products_have_the_autocast_dtype_and_weights_are_float32(model: str, amp: str, bits: str) -> None:
    program, state = lowered(case_of(model, amp, accumulation_steps=2))
    operands = [operand for product in PRODUCT.findall(program) for operand in product]
    # Each layer has one product forward, one backward for its weights and, except the first, one for its input.
    assert len(operands) >= {"mlp": 2 * 8, "char_mlp": 2 * 6, "convnet": 2 * 20}[model]
    assert all(operand.endswith(f"x{bits}>") for operand in operands), operands
    reals = [x.dtype for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert set(reals) == {np.dtype(np.float32)}
