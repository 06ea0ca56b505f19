"""Casts are lifted in float64 without a change to random numbers, which keep their dtype."""

from functools import partial

import jax
import pytest
from flax import linen
from jax import numpy as jnp

from jaxddp.parity.jax_side.widened import can_run, in_float64, within


class Net(linen.Module):
    """A layer in float32 behind a parameter that linen draws again to compare its shape."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        w = self.param("w", linen.initializers.normal(1.0), (1, 3))
        return linen.Dense(2, dtype=jnp.float32)(x * w)


@pytest.mark.parametrize("lifted", [(), (["float32"],)], ids=["all casts", "float32"])
@pytest.mark.parametrize("draw", [jax.random.normal, jax.random.uniform], ids=["normal", "uniform"])
def test_random_numbers_keep_their_dtype(draw, lifted) -> None:
    with jax.enable_x64(True), in_float64(*lifted):
        assert draw(jax.random.key(0), (2,), jnp.float32).dtype == jnp.float32


def test_a_linen_model_runs_with_its_layers_casts_lifted() -> None:
    with jax.enable_x64(True):
        x = jnp.ones((4, 3))
        variables = jax.tree.map(lambda a: a.astype("float64"), Net().init(jax.random.key(0), x))
        assert can_run(within(in_float64, Net().apply), variables, x)
        with in_float64():
            assert Net().apply(variables, x).dtype == jnp.float64


def test_a_table_in_float32_leaves_the_casts_of_layers_lifted() -> None:
    """With its integers lifted, the table's loop would carry two dtypes, which jax refuses."""

    def loss(x: jax.Array) -> jax.Array:
        angles, _ = jax.lax.scan(lambda sum, n: (sum + n, None), jnp.float32(0), jnp.arange(3, dtype=jnp.float32))
        return linen.LayerNorm(dtype=jnp.float32).apply({"params": {"scale": x[0], "bias": x[0]}}, x) * angles

    with jax.enable_x64(True):
        x = jnp.ones((4, 3), jnp.float64)
        assert not can_run(within(in_float64, loss), x)
        assert can_run(within(partial(in_float64, integers=False), loss), x)
        with in_float64(integers=False):
            assert loss(x).dtype == jnp.float64
