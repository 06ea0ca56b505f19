"""Communication hooks against torch's own on gloo, in every stage of every step."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxddp import comm_hooks
from jaxddp.comm_hooks import CommHook
from jaxddp.distributed.collectives import all_reduce_mean
from jaxddp.distributed.replicas import Replicas
from jaxddp.parity.torch_side.pool import TorchPool
from tests.support.cases import even_case
from tests.support.processor import needs_float16
from tests.support.trajectories import check_differs, check_equal, compare, run_in_both, run_jax

EQUAL = 1e-12  # float64; measured: up to 7e-16
# Sums over more than two replicas are rounded in another order. Largest difference, relative to the gradient's norm.
ROUNDED = {"bf16_compress": 2**-7, "fp16_compress": 2**-10}  # measured: 2.7e-3 and 5.0e-4
FAULT = 1e-4  # smallest difference, of the gradient's norm, that a wrong hook must cause; measured: 3.5e-4


def case_of(name: str, world_size: int) -> Any:
    return even_case("mlp", "sgd", world_size, steps=8, comm_hook=name, accumulation_steps=2, momentum=0.9)


FP16 = pytest.param("fp16_compress", marks=needs_float16)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.large)])
@pytest.mark.parametrize("name", ["allreduce", "bf16_compress", FP16])
def test_every_step_equals_torchs(name: str, world_size: int, pool: TorchPool) -> None:
    allowed = EQUAL if world_size == 2 else ROUNDED.get(name, EQUAL)
    check_equal(run_in_both(case_of(name, world_size), pool), allowed)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("bf16_compress", all_reduce_mean),
        pytest.param("bf16_compress", comm_hooks.fp16_compress(), marks=needs_float16),
        ("fp16_compress", comm_hooks.bf16_compress()),
        pytest.param("allreduce", comm_hooks.fp16_compress(), marks=needs_float16),
    ],
)
def test_another_hook_is_detected(name: str, wrong: CommHook, pool: TorchPool) -> None:
    runs = run_in_both(case_of(name, 2), pool, comm_hook=wrong)
    check_differs(compare(*runs, EQUAL), "gradients", FAULT)


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16_compress", "bf16"), pytest.param("fp16_compress", "f16", marks=needs_float16)]
)
def test_compressed_gradients_are_sent_in_16_bits(name: str, dtype: str) -> None:
    """Read the program that XLA is given: for CPU devices XLA widens bfloat16 to float32, for GPUs it does not."""
    hook: CommHook = getattr(comm_hooks, name)()
    replicas = Replicas(jax.devices()[:2])
    x = replicas.shard({"w": np.ones((2, 5), np.float32)})
    program = replicas.map(lambda g: hook.reduce(g, ())[0], in_axes=(0,), out_axes=None).lower(x)
    sent = re.findall(r"stablehlo.all_reduce.*?\}\) : \((.*?)\) ->", program.as_text(), re.S)
    assert sent == [f"tensor<5x{dtype}>"]
    if dtype == "f16":
        assert len(re.findall(r"= f16\[5\]\S* all-reduce\(", program.compile().as_text())) == 1


@pytest.mark.large
@pytest.mark.parametrize(("name", "dtype"), [("bf16_compress", "bf16"), ("fp16_compress", "f16")])
def test_eight_gpus_are_sent_the_hooks_dtype(name: str, dtype: str) -> None:
    """Compile for GPUs, which takes jax's CUDA plugin but no GPU, and read the program."""
    plugin = Path(sys.prefix, "cuda-plugin")
    assert plugin.is_dir(), f"{plugin}: missing; `make test-all` installs it"
    script = Path(__file__).parents[1] / "support" / "gpu_wire.py"
    path = os.pathsep.join([str(plugin), str(Path.cwd())])
    command, environment = [sys.executable, script, name], os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.split() == [dtype]


@needs_float16
def test_large_sums_stay_finite_in_float16() -> None:
    """Divide before sending: 4 times 40000 is beyond float16, the mean is not."""
    replicas = Replicas(jax.devices()[:4])
    x = replicas.shard({"w": np.full((4, 3), 40000, np.float32)})
    mean = replicas.map(lambda g: comm_hooks.fp16_compress().reduce(g, ())[0], in_axes=(0,), out_axes=None)(x)
    np.testing.assert_array_equal(mean["w"], np.float32(40000))


def local_momentum(beta: float) -> CommHook:
    """Return a hook with a state: momentum of each replica's own gradients."""

    def reduce(gradients: Any, state: Any) -> Any:
        kept = jax.tree.map(lambda old, new: beta * old + new, state, gradients)
        return all_reduce_mean(kept), kept

    return CommHook(lambda params: jax.tree.map(lambda p: 0 * p, params), reduce)


@pytest.mark.large
def test_a_custom_hook_keeps_a_state_per_replica(pool: TorchPool) -> None:
    """Momentum of the local gradients, then averaged, equals torch's momentum of the averaged gradients."""
    with_momentum, without = (even_case("mlp", "sgd", 2, steps=6, weight_decay=0.0, momentum=m) for m in (0.9, 0.0))
    weights = with_momentum.initial_weights()
    ours = run_jax(without, weights, comm_hook=local_momentum(0.9))
    comparison = compare(ours, pool.run(with_momentum, weights), EQUAL, ("local_loss", "local_gradients", "params"))
    assert comparison.equal, comparison
    forgetful = run_jax(without, weights, comm_hook=local_momentum(0.0))
    assert not compare(forgetful, pool.run(with_momentum, weights), EQUAL, ("params",)).equal
