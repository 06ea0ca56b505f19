"""Compiler options for GPUs, and that CPU devices get none of them."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxddp.distributed.collectives import all_reduce_mean
from jaxddp.distributed.gpu_options import SMALLEST_BUCKET, compiler_options, kept_apart, options_for
from jaxddp.distributed.replicas import Replicas

THRESHOLD = "xla_gpu_all_reduce_combine_threshold_bytes"


class OfGPU:
    platform = "gpu"


def test_the_threshold_follows_the_bytes_of_the_gradients() -> None:
    assert compiler_options(400_000_000)[THRESHOLD] == 100_000_000
    assert compiler_options(1000)[THRESHOLD] == SMALLEST_BUCKET == 4 * 2**20


def test_options_of_the_user_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", f"--{THRESHOLD}=1")
    assert list(compiler_options(1000)) == ["xla_gpu_enable_latency_hiding_scheduler"]


def test_only_gpus_get_options() -> None:
    gradients = {"w": jax.ShapeDtypeStruct((10_000_000,), jnp.float32)}
    assert options_for(jax.devices()[:2], gradients) == {}
    assert options_for([OfGPU()], gradients)[THRESHOLD] == 10_000_000  # type: ignore[list-item]


def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    mean = all_reduce_mean(x * state)
    return kept_apart(state) - mean, mean


def test_a_program_with_options_computes_the_same_and_donates() -> None:
    """`jax.jit` around the one pmap takes the options; any option of XLA's will do here."""
    replicas = Replicas(jax.devices()[:2])
    x = replicas.shard(np.arange(6, dtype=np.float32).reshape(2, 3))
    results = []
    for options in ({}, {"xla_embed_ir_in_executable": True}):
        state = replicas.replicate(np.ones(3, np.float32))
        mapped = replicas.map(step, (None, 0), (None, None), donate=(0,), compiler_options=options)
        assert mapped.lower(state, x).compile().memory_analysis().alias_size_in_bytes == 12  # the state's memory
        after, mean = mapped(state, x)
        assert state.is_deleted() and after.sharding.is_fully_replicated
        results.append((np.asarray(after), np.asarray(mean)))
    np.testing.assert_array_equal(results[0], results[1])


def test_an_unknown_option_reaches_the_compiler() -> None:
    replicas = Replicas(jax.devices()[:2])
    mapped = replicas.map(step, (None, 0), (None, None), compiler_options={"xla_no_such_option": 1})
    arguments = replicas.replicate(np.ones(3, np.float32)), replicas.shard(np.ones((2, 3), np.float32))
    for compile_it in (mapped, lambda *given: mapped.lower(*given).compile()):
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
            compile_it(*arguments)


def test_parameters_are_kept_apart_on_gpus_only() -> None:
    lowered = jax.jit(kept_apart).trace(jnp.ones(3)).lower
    assert "optimization_barrier" not in lowered(lowering_platforms=("cpu",)).as_text()
    assert "optimization_barrier" in lowered(lowering_platforms=("cuda",)).as_text()
