"""Ports with large tensors, of which the records hold excerpts: right ones are equal, faults are named."""

import pytest

from jaxddp.parity.excerpts import distance
from tests.support.checks import Checked
from tests.support.small_port import Change, own_optimizers, step, wide

WIDTH = 400
WIDE = wide(WIDTH)
LARGER = wide(3000)  # 9 million parameters, more than `records.LARGE_MODEL`
ADAMW = own_optimizers("AdamW(parameters, lr=0.01, weight_decay=0.1)", "optax.adamw(0.01, weight_decay=0.1)")
CLIPS = own_optimizers(
    "SGD(parameters, lr=0.1)",
    "optax.chain(optax.stateless(lambda g, _: jaxddp.optim.clip_by_global_norm(g, 0.05)[0]), optax.sgd(0.1))",
)
CLIPS_MORE: Change = ("clip_by_global_norm(g, 0.05)", "clip_by_global_norm(g, 0.02)")
TORCH_CLIPS = "torch_clip_grad_norm = 0.05\n"


@pytest.mark.parametrize(
    ("optimizer", "more"),
    [(("sgd", "sgd"), "clip_grad_norm = 0.05\n"), (("sgd", "sgd"), step()), (ADAMW, ""), (CLIPS, TORCH_CLIPS)],
    ids=["clipped", "own step", "adamw", "clips by itself"],
)
@pytest.mark.large
def test_right_ports_are_equal(optimizer: Change, more: str, checked: Checked) -> None:
    report = checked(*WIDE, optimizer, more=more, numerics=True)
    assert report.verdict == "equal", report
    assert report.stages["update"].tensors["wide.weight"][0] == (WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("changes", "more", "stage", "name"),
    [
        ([("epsilon=1e-5", "epsilon=1e-6")], "", "local_loss", "norm_epsilon"),
        ([ADAMW, ("optax.adamw(0.01, weight_decay=0.1)", "optax.adamw(0.01)")], "", "update", "decay_value"),
        # Always active, so that a learning rate does the same.
        ([CLIPS, CLIPS_MORE], TORCH_CLIPS, "update", "clip_norm"),
        ([], step(("pmean", "psum")), "gradients", "sum_not_mean"),
    ],
    ids=["norm_epsilon", "decay_value", "clip_norm", "sum_not_mean"],
)
@pytest.mark.large
def test_faults_are_named(changes: list[Change], more: str, stage: str, name: str, checked: Checked) -> None:
    (found,) = checked(*WIDE, *changes, more=more).differences
    assert found.stage == stage and found.cause is not None and name in found.cause.names, found


@pytest.mark.large
def test_a_gradient_that_differs_outside_of_the_excerpt_is_found(checked: Checked) -> None:
    assert WIDTH % distance((WIDTH, WIDTH))  # so that the excerpt has no element [1, 0] of torch's weight
    wrong = (
        "    import jax\n"
        "    element = model.wide.kernel[...][0, 1]\n"
        "    return 0.01 * (element - jax.lax.stop_gradient(element)) + cross_entropy"
    )
    report = checked(*WIDE, ("    return cross_entropy", wrong))
    (found,) = report.differences
    assert (found.stage, found.tensor) == ("local_gradients", "wide.weight")


@pytest.mark.parametrize("more", ["", step()], ids=["", "own step"])
@pytest.mark.large
def test_a_right_port_of_a_large_model_is_equal(more: str, checked: Checked) -> None:
    report = checked(*LARGER, ADAMW, more=more, numerics=True)
    assert report.verdict == "equal", report
    assert report.free_running["params"].residuals[-1] > 0  # it moved


@pytest.mark.parametrize(
    ("changes", "stage", "name"),
    [
        ([ADAMW, ("epsilon=1e-5", "epsilon=1e-6")], "local_loss", "norm_epsilon"),
        ([ADAMW, ("optax.adamw(0.01, weight_decay=0.1)", "optax.adamw(0.01)")], "update", "decay_value"),
    ],
    ids=["norm_epsilon", "decay_value"],
)
@pytest.mark.large
def test_faults_of_a_large_model_are_named(changes: list[Change], stage: str, name: str, checked: Checked) -> None:
    (found,) = checked(*LARGER, *changes).differences
    assert found.stage == stage and found.cause is not None and found.cause.names == (name,), found
