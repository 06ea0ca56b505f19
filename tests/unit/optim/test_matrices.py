"""Adafactor and Muon of jaxddp.optim against torch.optim, step by step, on kernels as flax has them and others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from jaxddp import optim
from jaxddp.errors import InputError
from jaxddp.torch_layout import from_torch_layout, to_torch_layout

# Largest deviations of a parameter, relative to how far torch moved it, in float64; with the measured ones.
TOLERANCE = 1e-12  # 1e-14; sums of larger matrices round to another bfloat16: 1e-3
FAULT = 1e-3  # smallest with a planted fault: 0.0058 (one product of Muon that is not rounded)

STEPS = 20
LR = 0.05
TENSORS = {"fc.kernel": (6, 4), "conv.kernel": (6, 4, 3, 3), "table.embedding": (7, 3), "bias": (5,), "scale": ()}
MATRICES = {"fc.kernel": (6, 4), "wide.kernel": (3, 8), "table.embedding": (5, 5)}  # in torch's layout
CASES: list[tuple[str, dict[str, Any]]] = [
    ("adafactor", {}),
    ("adafactor", {"beta2_decay": -0.5, "eps": (1e-3, 1e-2), "d": 1.5, "weight_decay": 0.1, "maximize": True}),
    ("muon", {}),
    ("muon", {"momentum": 0.5, "nesterov": False, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}),
    ("muon", {"ns_steps": 2, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1.0}),
]
SHAPES = {"adafactor": TENSORS, "muon": MATRICES}
TORCH = {"adafactor": torch.optim.Adafactor, "muon": torch.optim.Muon}


def tree(flat: dict[str, Any]) -> dict[str, Any]:
    """Nest arrays as a model has them, in flax's layout."""
    nested: dict[str, Any] = {}
    for name, x in flat.items():
        *outer, last = name.split(".")
        of_layer = nested.setdefault(outer[0], {}) if outer else nested
        of_layer[last] = jnp.asarray(from_torch_layout(name, x))
    return nested


def deviation(optimizer: optax.GradientTransformation, name: str, options: dict[str, Any]) -> float:
    """Return the largest deviation from torch's parameters over the steps."""
    rng = np.random.default_rng(0)
    start, *gradients = ({k: rng.normal(size=shape) for k, shape in SHAPES[name].items()} for _ in range(STEPS + 1))
    of_torch = {k: torch.nn.Parameter(torch.tensor(x)) for k, x in start.items()}
    reference = TORCH[name](of_torch.values(), lr=LR, **options)
    params = tree(start)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    worst = 0.0
    for gradient in gradients:
        for k, parameter in of_torch.items():
            parameter.grad = torch.tensor(gradient[k])
        reference.step()
        updates, state = update(tree(gradient), state, params)
        params = optax.apply_updates(params, updates)
        for k, parameter in of_torch.items():
            layer, _, leaf = k.rpartition(".")
            x = to_torch_layout(k, np.asarray(params[layer][leaf] if layer else params[leaf]))
            truth = parameter.detach().numpy()
            worst = max(worst, float(np.abs(x - truth).max() / np.abs(truth - start[k]).max()))
    return worst


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_every_step_equals_torchs(name: str, options: dict[str, Any], x64: None) -> None:
    assert deviation(getattr(optim, name)(LR, **options), name, options) <= TOLERANCE


def in_flax_layout(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Hide the names of kernels, so that the optimizer does not transpose them."""

    def renamed(of: Any) -> Any:
        return jax.tree_util.tree_leaves(of)

    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, state = optimizer.update(renamed(grads), state, renamed(params))
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(grads), updates), state

    return optax.GradientTransformation(lambda params: optimizer.init(renamed(params)), update)


FAULTS: dict[str, tuple[optax.GradientTransformation, str]] = {
    "rows and columns of flax's kernels": (in_flax_layout(optim.adafactor(LR)), "adafactor"),
    "optax's adafactor": (optax.adafactor(LR, min_dim_size_to_factor=1), "adafactor"),
    "the rate not capped by 1 / sqrt(t)": (optim.adafactor(LR * 2), "adafactor"),
    "flax's shape": (in_flax_layout(optim.muon(LR)), "muon"),
    "one step less": (optim.muon(LR, ns_steps=4), "muon"),
    "optax's muon": (optax.contrib.muon(LR, weight_decay=0.1), "muon"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_catches(fault: str, x64: None) -> None:
    faulty, name = FAULTS[fault]
    assert deviation(faulty, name, {}) > FAULT


def test_what_is_not_a_matrix_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"^muon: bias has shape \(3,\); must be a matrix \(optax.partition\)$"):
        optim.muon().init({"fc": {"bias": jnp.zeros(3)}})
    with pytest.raises(InputError, match=r"^d 0.5: must be at least 1$"):
        optim.adafactor(d=0.5)
