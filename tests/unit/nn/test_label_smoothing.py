"""Label smoothing: torch's cross_entropy, and Optax's smooth_labels, on sequences with ignored labels."""

import numpy as np
import optax
import pytest
import torch
from jax import numpy as jnp
from torch.nn import functional as F

from jaxddp.nn.losses import cross_entropy
from jaxddp.program import built_in
from torch_ref.losses import cross_entropy as torch_cross_entropy

TOLERANCE = 1e-14  # relative, float64; measured: 2.2e-16


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_smoothed_losses_equal_torchs_and_optaxs(smoothing: float, x64: None) -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(3, 5, 7)), rng.integers(0, 7, (3, 5))
    labels[0, 2:] = -100
    ours = cross_entropy(lambda x: x, {"x": jnp.asarray(logits), "y": jnp.asarray(labels)}, smoothing)
    assert ours.weights is not None
    tensors = {"x": torch.tensor(logits), "y": torch.tensor(labels)}
    mean = F.cross_entropy(tensors["x"].flatten(0, 1), tensors["y"].flatten(), label_smoothing=smoothing).item()
    sums = torch_cross_entropy(torch.nn.Identity(), tensors, smoothing)
    assert (ours.values * ours.weights).sum() / ours.weights.sum() == pytest.approx(mean, rel=TOLERANCE)
    assert (sums["loss"] / sums["count"]).item() == pytest.approx(mean, rel=TOLERANCE)
    smooth = optax.smooth_labels(jnp.eye(7)[labels[1]], smoothing)
    expected = optax.softmax_cross_entropy(jnp.asarray(logits[1]), smooth)
    np.testing.assert_allclose(ours.values[1], expected, TOLERANCE)


def test_a_test_is_not_smoothed(x64: None) -> None:
    program = built_in()
    options = program.options(label_smoothing=0.5)  # type: ignore[misc]
    batch = {"x": jnp.asarray([[2.0, 0.0]]), "y": jnp.asarray([0])}
    losses = [program.get("jax_loss")(lambda x: x, batch, options, train=train).values[0] for train in (True, False)]
    assert losses[1] == pytest.approx(np.log1p(np.exp(-2.0))) and losses[0] == pytest.approx(losses[1] + 0.5)
