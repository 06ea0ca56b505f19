"""The fix that a report gives is applied to the port, which is then equal."""

import pytest

from jaxddp.parity.catalogue import FAULTS
from tests.support.checks import Checked
from tests.support.small_port import own_optimizers

CLIPS = "torch_clip_grad_norm = 0.05\n"
ADAMW = "AdamW(parameters, lr=0.01, weight_decay=0.1)"
RMSPROP = "RMSprop(parameters, lr=0.01)"

# Fault, torch's optimizer, the port's, a piece of the fix, the port's with it.
FIXES = [
    (
        "clip_epsilon",
        "SGD(parameters, lr=0.1)",
        "optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1))",
        "optax.stateless(lambda g, _: jaxddp.optim.clip_by_global_norm(g, ",
        "optax.chain(optax.stateless(lambda g, _: jaxddp.optim.clip_by_global_norm(g, 0.05)[0]), optax.sgd(0.1))",
    ),
    (
        "eps_in_root",
        RMSPROP,
        "optax.rmsprop(0.01, decay=0.99)",
        "eps_in_sqrt=False",
        "optax.rmsprop(0.01, decay=0.99, eps_in_sqrt=False)",
    ),
    (
        "eps_in_root",
        "Adagrad(parameters, lr=0.1, eps=1e-6)",
        "optax.adagrad(0.1, initial_accumulator_value=0.0, eps=1e-6)",
        "jaxddp.optim.adagrad(",
        "jaxddp.optim.adagrad(0.1, eps=1e-6)",
    ),
    (
        "adagrad_accumulator",
        "Adagrad(parameters, lr=0.1, eps=0.0)",
        "optax.adagrad(0.1, eps=0.0)",
        "initial_accumulator_value=0.",
        "optax.adagrad(0.1, eps=0.0, initial_accumulator_value=0.)",
    ),
    (
        "amsgrad",
        "Adam(parameters, lr=0.01, amsgrad=True)",
        "optax.amsgrad(0.01)",
        "jaxddp.optim.adam(amsgrad=True)",
        "jaxddp.optim.adam(0.01, amsgrad=True)",
    ),
    (
        "dampening",
        "SGD(parameters, lr=0.1, momentum=0.9, dampening=0.3)",
        "optax.sgd(0.1, momentum=0.9)",
        "jaxddp.optim.sgd(dampening=",
        "jaxddp.optim.sgd(0.1, momentum=0.9, dampening=0.3)",
    ),
    (
        "coupled_decay",
        ADAMW,
        "optax.chain(optax.add_decayed_weights(0.1), optax.adam(0.01))",
        "optax.adamw",
        "optax.adamw(0.01, weight_decay=0.1)",
    ),
    (
        "rmsprop_decay",
        RMSPROP,
        "optax.rmsprop(0.01, eps_in_sqrt=False)",
        "optax.rmsprop(decay=0.99, eps_in_sqrt=False)",
        "optax.rmsprop(0.01, decay=0.99, eps_in_sqrt=False)",
    ),
    (
        "decay_without_lr",
        ADAMW,
        "optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(0.01), optax.add_decayed_weights(-0.1))",
        "add_decayed_weights before scale_by_learning_rate",
        "optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(0.01))",
    ),
]


@pytest.mark.large
@pytest.mark.parametrize(("fault", "torch", "wrong", "piece", "right"), FIXES, ids=[fix[0] for fix in FIXES])
def test_a_fix_makes_the_port_equal(
    fault: str, torch: str, wrong: str, piece: str, right: str, checked: Checked
) -> None:
    clips = CLIPS if fault == "clip_epsilon" else ""
    (found,) = checked(own_optimizers(torch, wrong), more=clips).differences
    assert found.cause is not None and found.cause.names == (fault,)
    assert piece in FAULTS[fault].fix
    report = checked(own_optimizers(torch, right), more=clips)
    assert report.verdict == "equal", report
