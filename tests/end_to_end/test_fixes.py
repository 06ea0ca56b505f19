"""The fix that a report gives is applied to the port, which is then equal."""

import pytest

from jaxddp.parity.catalogue import FAULTS
from tests.support.checks import Checked
from tests.support.small_port import Change, own_optimizers

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


TORCH_LOSS = 'return F.cross_entropy(model(batch["x"]), batch["y"])'
FLAX_LOSS = 'return cross_entropy(model(batch["x"]), batch["y"]).mean()'

# Fault, torch's loss, the port's, a piece of the fix, the port's with it.
FIXES_OF_LOSSES = [
    (
        "std_correction",
        'F.cross_entropy(model(batch["x"]) / torch.std(batch["x"]), batch["y"])',
        'cross_entropy(model(batch["x"]) / jnp.std(batch["x"]), batch["y"]).mean()',
        "jnp.std(x, ddof=1)",
        'cross_entropy(model(batch["x"]) / jnp.std(batch["x"], ddof=1), batch["y"]).mean()',
    ),
    (
        "clipped_term",
        'torch.max(model(batch["x"]) ** 2, (model(batch["x"]) - 1) ** 2).mean()',
        'jnp.minimum(model(batch["x"]) ** 2, (model(batch["x"]) - 1) ** 2).mean()',
        "jnp.maximum(a, b) for torch.max(a, b)",
        'jnp.maximum(model(batch["x"]) ** 2, (model(batch["x"]) - 1) ** 2).mean()',
    ),
    (
        "clamp_missing",
        'F.cross_entropy(torch.clamp(model(batch["x"]), -0.2, 0.2), batch["y"])',
        'cross_entropy(model(batch["x"]), batch["y"]).mean()',
        "jnp.clip(x, low, high)",
        'cross_entropy(jnp.clip(model(batch["x"]), -0.2, 0.2), batch["y"]).mean()',
    ),
]


@pytest.mark.large
@pytest.mark.parametrize(
    ("fault", "torch", "wrong", "piece", "right"), FIXES_OF_LOSSES, ids=[fix[0] for fix in FIXES_OF_LOSSES]
)
def test_a_fix_of_a_loss_makes_the_port_equal(
    fault: str, torch: str, wrong: str, piece: str, right: str, checked: Checked
) -> None:
    def losses(flax: str) -> tuple[Change, Change]:
        return (TORCH_LOSS, f"return {torch}"), (FLAX_LOSS, f"import jax.numpy as jnp\n    return {flax}")

    (found,) = checked(*losses(wrong)).differences
    assert found.cause is not None and found.cause.names == (fault,)
    assert piece in FAULTS[fault].fix
    report = checked(*losses(right))
    assert report.verdict == "equal", report


@pytest.mark.large
def test_the_fix_of_a_warm_up_makes_the_port_equal(checked: Checked) -> None:
    more = """
def torch_scheduler(optimizer):
    from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.25, total_iters=2), CosineAnnealingLR(optimizer, 10)], [2])
"""

    def schedule(first: float) -> Change:
        peak = f"init_value={first}, peak_value=0.1, warmup_steps=2, decay_steps=12"
        return own_optimizers("SGD(parameters, lr=0.1)", f"optax.sgd(optax.warmup_cosine_decay_schedule({peak}))")

    (found,) = checked(schedule(0.0), more=more).differences
    assert found.cause is not None and found.cause.names == ("warmup_start",)
    assert found.cause.says == ("the learning rate's warm-up starts at 0, the reference's at 0.025",)
    assert "optax.warmup_cosine_decay_schedule(init_value=first_rate, peak_value=" in FAULTS["warmup_start"].fix
    report = checked(schedule(0.025), more=more)
    assert report.verdict == "equal", report


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
