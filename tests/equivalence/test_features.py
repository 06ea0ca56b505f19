"""Features between gradient and update, against torch: accumulation, clipping, loss normalization, schedules."""

import pytest

from tests.support.cases import even_case, small_case
from tests.support.trajectories import compare

TOLERANCE = {"sgd": 1e-12, "adam": 1e-10}  # [6e-15, 7e-15]

FEATURES = {
    "accumulation": {"accumulation_steps": 4, "global_batch_size": 64},
    "accumulation, uneven labels": {"accumulation_steps": 2, "global_batch_size": 64, "ignored_labels": 0.3},
    "clipping": {"clip_grad_norm": 0.1},
    "clipping above every norm": {"clip_grad_norm": 100.0},
    "global normalization": {"loss_normalization": "global", "ignored_labels": 0.3},
    "global normalization, accumulation, clipping": {
        "loss_normalization": "global",
        "ignored_labels": 0.3,
        "accumulation_steps": 2,
        "global_batch_size": 64,
        "clip_grad_norm": 0.1,
    },
    "step schedule": {"schedule": "step", "step_size": 3, "gamma": 0.5},
    "warm-up and cosine": {"schedule": "warmup_cosine", "warmup_steps": 5, "min_lr": 1e-4},
    "one cycle": {"schedule": "one_cycle", "lr": 0.1},
}


OF_SGD = {
    "nesterov": {"nesterov": True, "momentum": 0.9},
    "dampening": {"dampening": 0.5, "momentum": 0.9},
}

# These features come before the optimizer, whichever it is: with Adam two of them, the others in `make test-all`.
WITH_ADAM = ("global normalization, accumulation, clipping", "one cycle")
CASES = [(feature, "sgd") for feature in FEATURES | OF_SGD] + [
    pytest.param(feature, "adam", marks=() if feature in WITH_ADAM else pytest.mark.large) for feature in FEATURES
]


@pytest.mark.one_in(4, first=1)
@pytest.mark.parametrize(("feature", "optimizer"), CASES)
def test_features_equal_torchs(feature, optimizer, run_both):
    options = (FEATURES | OF_SGD)[feature]
    make = even_case if {"schedule", "momentum"} & options.keys() else small_case
    case = make("mlp", optimizer, world_size=4, **options)
    comparison = compare(*run_both(case), TOLERANCE[optimizer])
    assert comparison.equal, comparison
