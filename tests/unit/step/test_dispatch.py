"""Models with convolutions on CPU: no loop is around them, numbers stay, and slow forms are named."""

import functools
import re
import warnings
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax import numpy as jnp

from jaxddp import layers, optim
from jaxddp.data.torch_rng import Generator
from jaxddp.data_parallel import DistributedDataParallel
from jaxddp.distributed.replicas import Replicas
from jaxddp.loader import Loader
from jaxddp.nn.losses import cross_entropy
from jaxddp.plan.messages import all_reduces
from jaxddp.step.loops import scan, scan_or_unroll, slow_in_loops
from tests.support.step_cases import two_epochs

TOLERANCE = 1e-6  # relative, float32; measured: equal bits
LOOP = re.compile(r' while\(.*op_name="[^"]*/while"')  # of a program in HLO text; XLA's own, of a scatter, is named so


class Net(nnx.Module):
    """A convolution, pooling, and a linear layer."""

    def __init__(self, pool: Any = layers.max_pool, loop: bool = False) -> None:
        generator = Generator(0)
        self.conv = layers.Conv(1, 2, (3, 3), padding=1, generator=generator)
        self.fc = layers.Linear(2 * 4, 3, generator=generator)
        self.pool, self.loop = pool, loop

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.loop:
            x = lax.scan(lambda x, _: (self.conv(x)[..., :1], None), x, None, length=2)[0]
        x = self.pool(jax.nn.relu(self.conv(x)), (2, 2))
        return self.fc(x.reshape(len(x), -1))


class Flat(nnx.Module):
    """A linear layer."""

    def __init__(self) -> None:
        self.fc = layers.Linear(16, 3, generator=Generator(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x.reshape(len(x), -1))


def ddp_of(model: nnx.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, optim.adam(0.01), replicas=Replicas(jax.devices()[:2]), **options)


@functools.cache
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(27, 4, 4, 1)).astype("float32")
    return {"x": x, "y": rng.integers(0, 3, 27).astype("int32")}


@functools.cache
def trained(steps_per_dispatch: int) -> tuple[DistributedDataParallel, Any, list[float], list[int]]:
    """Train for two epochs of 6 full steps and a smaller one."""
    options = {"global_batch_size": 4, "steps_per_dispatch": steps_per_dispatch}
    return two_epochs(Net(), cross_entropy, optim.adam(0.01), arrays(), **options)


def test_several_steps_per_dispatch_give_the_numbers_of_one() -> None:
    _, one, losses, _ = trained(1)
    _, several, same_losses, _ = trained(3)
    assert len(losses) == 14
    assert same_losses == pytest.approx(losses, rel=TOLERANCE)
    for name, value in one.params.items():
        np.testing.assert_allclose(several.params[name], value, rtol=0, atol=TOLERANCE, err_msg=name)
    assert losses[0] != pytest.approx(losses[1], rel=TOLERANCE)


def test_nothing_is_traced_again_in_the_second_epoch() -> None:
    for steps_per_dispatch in (1, 3):
        _, _, _, (after_one, after_two) = trained(steps_per_dispatch)
        assert after_one == after_two
        assert after_one <= 4  # two shapes; with several steps, the program of K and that of one


def batches(ddp: DistributedDataParallel, accumulation_steps: int = 1) -> Any:
    options = {"accumulation_steps": accumulation_steps, "steps_per_dispatch": 3}
    return next(Loader(arrays(), ddp.replicas, global_batch_size=8, **options).epoch(0))


def test_no_loop_is_around_a_convolution_on_cpu() -> None:
    ddp = ddp_of(Net())
    for accumulation_steps in (1, 4):
        text = ddp.compiled_text(ddp.init(), batches(ddp, accumulation_steps))
        assert "convolution" in text
        assert not LOOP.search(text)


def test_other_models_keep_their_loops() -> None:
    ddp = ddp_of(Flat())
    for accumulation_steps in (1, 4):
        text = ddp.compiled_text(ddp.init(), batches(ddp, accumulation_steps))
        assert len(LOOP.findall(text)) == (1 if accumulation_steps == 1 else 2)


@pytest.mark.parametrize("normalization", ["ddp", "global"])
def test_a_single_step_sends_as_many_messages_as_one_of_several(normalization: str) -> None:
    ddp = ddp_of(Flat(), loss_normalization=normalization)
    several = batches(ddp)
    single = jax.tree.map(lambda x: x[:, :1], several)
    counts = [all_reduces(ddp.compiled_text(ddp.init(), x)).count for x in (single, several)]
    assert counts == [1, 3]


def test_evaluation_batch_by_batch_gives_the_sums_of_one_batch() -> None:
    ddp, state, _, _ = trained(1)
    one, several = (ddp.evaluate(state, arrays(), batch_size) for batch_size in (256, 3))
    assert several == pytest.approx(one, rel=TOLERANCE)
    assert ddp.evaluate(ddp.init(), arrays()) != pytest.approx(one, rel=TOLERANCE)


def convolve(total: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = lax.conv_general_dilated(x, jnp.ones((3, 3, 1, 2)), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return total + y.sum(), y


def test_accumulation_unrolled_gives_the_numbers_of_a_loop() -> None:
    images = jnp.arange(96.0).reshape(3, 2, 4, 4, 1)
    (unrolled, ys), (looped, same_ys) = (
        jax.jit(lambda xs, each=each: each(convolve, jnp.float32(0), xs))(images) for each in (scan_or_unroll, scan)
    )
    assert (float(unrolled), ys.shape) == (float(looped), (3, 2, 4, 4, 2))
    np.testing.assert_array_equal(ys, same_ys)


def test_gpus_keep_the_loop() -> None:
    traced = jax.jit(lambda xs: scan_or_unroll(convolve, jnp.float32(0), xs)[0]).trace(jnp.ones((3, 2, 4, 4, 1)))
    texts = {platform: traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "cuda")}
    assert {platform: "stablehlo.while" in text for platform, text in texts.items()} == {"cpu": False, "cuda": True}


def test_convolutions_are_found_inside_of_other_functions() -> None:
    each = functools.partial(lax.map, Net())
    nested = jax.make_jaxpr(jax.jit(jax.checkpoint(lambda x: lax.cond(x.sum() > 0, each, each, x))))
    assert slow_in_loops(nested(jnp.ones((2, 2, 4, 4, 1))))
    assert not slow_in_loops(jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(x))(jnp.ones(2)))


def said(model: nnx.Module, accumulation_steps: int = 1) -> list[str]:
    ddp = ddp_of(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp.compiled_text(ddp.init(), batches(ddp, accumulation_steps))
    return [str(warning.message) for warning in caught]


def flax_max_pool(x: jax.Array, window: tuple[int, int]) -> jax.Array:
    return nnx.max_pool(x, window, strides=window)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_slow_forms_are_named_in_a_line_each(accumulation_steps: int) -> None:
    assert said(Net(), accumulation_steps) == []
    pooling = "the model pools with lax.reduce_window, which is slow on CPU; use jaxddp.layers.max_pool or avg_pool"
    assert said(Net(flax_max_pool), accumulation_steps) == [pooling]
    looped = "the model computes convolutions in a loop, which is slow on CPU; use lax.scan(..., unroll=True)"
    assert said(Net(loop=True), accumulation_steps) == [looped]
