"""What a loss returns, as sums: the same in jax and in torch."""

import numpy as np
import pytest
import torch
from jax import numpy as jnp

from jaxddp.nn.losses import as_losses, returns_mean, sums_of
from torch_ref.program import sums

X = np.arange(1.0, 5.0, dtype=np.float32)
RETURNED = {"mean": X.mean(), "one element": X.mean(keepdims=True), "a row for each": X}


@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("kind", RETURNED)
def test_one_element_for_several_examples_is_a_mean(kind: str, train: bool) -> None:
    counted = 1.0 if train and kind != "a row for each" else 4.0
    values, batch = RETURNED[kind], {"x": jnp.asarray(X)}
    of_jax = sums_of(as_losses(jnp.asarray(values)), None, train, {}, batch)
    of_torch = sums(torch.as_tensor(values), {"x": torch.as_tensor(X)}, train=train)
    for of_side in (of_jax, of_torch):
        assert {name: float(of_side[name]) for name in ("loss", "count")} == {"loss": 2.5 * counted, "count": counted}


@pytest.mark.parametrize("kind", RETURNED)
def test_a_mean_is_noted_so_that_no_padding_is_evaluated_with_it(kind: str) -> None:
    def loss(x: jnp.ndarray) -> jnp.ndarray:
        return sums_of(as_losses(jnp.asarray(RETURNED[kind])), None, False, {}, {"x": x})["loss"]

    assert returns_mean(loss, jnp.asarray(X)) == (kind != "a row for each")
