"""The tables of docs/optimizers.md: every class of torch has a row, every name exists, and Optax does what they say.

Where Optax differs, `FAULTS` of the tests beside this one show it, each under the name that `DIFFERS` has.
"""

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.optim import lr_scheduler

from jaxddp import optim, schedules
from tests.unit.optim import test_matrices, test_optimizers, test_schedules
from tests.unit.optim.test_optimizers import LR, STEPS, deviation, run_jax, run_torch

TOLERANCE = 1e-12  # float64; measured: 1.0e-14 (adamw), 2.8e-16 of a schedule
PAGE = Path(__file__).parents[3] / "docs/optimizers.md"
MISSING = {"LBFGS", "SparseAdam", "Optimizer"}
# Row -> planted fault in the tests beside this one.
DIFFERS = {
    "Adam(amsgrad=True)": "amsgrad of corrected moments",
    "NAdam": "nadam's momentum not scheduled",
    "RAdam": "radam's threshold in float32",
    "Adagrad": "adagrad's eps inside the root",
    "RMSprop": "rmsprop's eps inside the root",
    "Rprop": "rprop's sizes a step late",
    "Adafactor": "optax's adafactor",
    "Muon": "optax's muon",
    "OneCycleLR": "optax's one cycle",
}
# Row -> Optax's transformation with torch's numbers, and torch's options.
EQUAL: dict[str, tuple[optax.GradientTransformation, dict[str, Any]]] = {
    "SGD": (optax.chain(optax.add_decayed_weights(0.1), optax.sgd(LR, 0.9)), {"momentum": 0.9, "weight_decay": 0.1}),
    "Adam": (optax.chain(optax.add_decayed_weights(0.1), optax.adam(LR)), {"weight_decay": 0.1}),
    "AdamW": (optax.adamw(LR, weight_decay=1e-2), {}),
    "Adamax": (optax.chain(optax.add_decayed_weights(0.1), optax.adamax(LR)), {"weight_decay": 0.1}),
    "Adadelta": (optax.chain(optax.add_decayed_weights(0.1), optax.adadelta(LR)), {"weight_decay": 0.1}),
    "RMSprop": (optax.rmsprop(LR, 0.99, eps_in_sqrt=False), {}),
}
# Row -> Optax's schedule over 100 steps, and jaxddp's, which the tests of random options compare with torch's.
EQUAL_SCHEDULES: dict[str, tuple[optax.Schedule, optax.Schedule]] = {
    "StepLR": (optax.exponential_decay(LR, 7, 0.5, staircase=True), schedules.step(LR, 7, 0.5)),
    "MultiStepLR": (optax.piecewise_constant_schedule(LR, {30: 0.5, 80: 0.5}), schedules.multi_step(LR, [30, 80], 0.5)),
    "ConstantLR": (
        optax.piecewise_constant_schedule(LR / 4, {40: 4.0}),
        schedules.constant_factor(LR, 0.25, 40),
    ),
    "LinearLR": (optax.linear_schedule(LR / 2, LR, 70), schedules.linear(LR, 0.5, 1.0, 70)),
    "ExponentialLR": (optax.exponential_decay(LR, 1, 0.9), schedules.exponential(LR, 0.9)),
    "PolynomialLR": (optax.polynomial_schedule(LR, 0.0, 1.5, 70), schedules.polynomial(LR, 70, 1.5)),
    "CosineAnnealingLR": (optax.cosine_decay_schedule(LR, 100), schedules.cosine(LR, 100)),
    "CosineAnnealingWarmRestarts": (
        optax.sgdr_schedule([{"init_value": LR, "peak_value": LR, "warmup_steps": 0, "decay_steps": 50}] * 2),
        schedules.cosine_restarts(LR, 50),
    ),
    "SequentialLR": (
        optax.join_schedules([optax.constant_schedule(LR / 4), optax.exponential_decay(LR, 1, 0.9)], [20]),
        schedules.sequential([schedules.constant_factor(LR, 0.25, 99), schedules.exponential(LR, 0.9)], [20]),
    ),
}


def rows(title: str) -> dict[str, list[str]]:
    """Return the cells of a table by torch's name."""
    section = PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells[1:] for cells in lines}


def names(cell: str) -> list[str]:
    return [name.partition("(")[0] for name in re.findall(r"`([^`]+)`", cell)]


def test_every_class_of_torch_has_a_row_and_every_name_exists() -> None:
    of_torch = {name for name, item in vars(torch.optim).items() if isinstance(item, type)} - MISSING
    assert {name.partition("(")[0] for name in rows("Optimizers")} == of_torch
    of_torch = {
        n
        for n, item in vars(lr_scheduler).items()
        if isinstance(item, type) and issubclass(item, lr_scheduler.LRScheduler)
    }
    assert set(rows("Schedules")) == (of_torch - {"LRScheduler", "_LRScheduler"}) | {"SWALR"}
    for title in ("Optimizers", "Schedules"):
        for ours, theirs, *_ in rows(title).values():
            assert all(hasattr(optim, name) or hasattr(schedules, name) for name in names(ours.replace("optim.", "")))
            assert all(hasattr(optax, name.removeprefix("contrib.")) or "contrib" in name for name in names(theirs)), (
                theirs
            )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", EQUAL)
def test_optax_is_equal_where_the_table_says_so(name: str, x64: None) -> None:
    optimizer, options = EQUAL[name]
    assert deviation(run_jax(optimizer), run_torch(name.lower(), options)) <= TOLERANCE


def test_optaxs_schedules_are_equal_where_the_table_says_so(x64: None) -> None:
    counts = jnp.arange(STEPS)
    for name, (theirs, ours) in EQUAL_SCHEDULES.items():
        assert np.abs(jnp.stack([theirs(t) for t in counts]) - ours(counts)).max() <= TOLERANCE * LR, name


def test_where_the_table_says_that_optax_differs_a_planted_fault_shows_it() -> None:
    planted = {**test_optimizers.FAULTS, **test_matrices.FAULTS, **test_schedules.FAULTS}
    assert set(DIFFERS.values()) <= planted.keys()
    elsewhere = {"LambdaLR", "ReduceLROnPlateau"}  # a function of one's own; test_optaxs_plateau_falls_an_epoch_earlier
    for title in ("Optimizers", "Schedules"):
        for name, (_, nearest, *text) in rows(title).items():
            assert nearest == "none" or name in {*EQUAL, *EQUAL_SCHEDULES, *DIFFERS, *elsewhere}, name
            assert text[:1] != ["none"] or name not in DIFFERS, name
