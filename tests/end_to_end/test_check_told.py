"""Differences without a name are told with their place, and with what their tensors have in common."""

import pytest

from tests.support.checks import FROZEN, SCALED, Checked
from tests.support.small_port import own_optimizers, step

MASKED = """optax.multi_transform(
    {"moves": optax.sgd(0.1), "stays": optax.set_to_zero()},
    lambda params: __import__("jax").tree_util.tree_map_with_path(
        lambda path, _: "stays" if path[0].key == "fc1" else "moves", params
    ),
)"""
# The rate follows the number of the step, which the port's own step may forget to count.
HALVED = """
def torch_scheduler(optimizer): return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
"""
HALVES = (
    "optax.apply_updates(state.params, updates)",
    "optax.apply_updates(state.params, jax.tree.map(lambda u: u * 0.5**state.step, updates))",
)
LOSES_COUNT = ("TrainState(state.step + 1,", "TrainState(state.step,")


@pytest.mark.large
def test_a_parameter_that_torch_has_frozen_and_jax_moves_is_told(checked: Checked) -> None:
    sgd = own_optimizers("SGD(parameters, lr=0.1)", "optax.sgd(0.1)")
    report = checked(sgd, FROZEN)
    (found,) = report.differences
    assert (found.stage, found.step, found.cause) == ("update", 1, None)
    assert found.tensor.startswith("fc1.") and found.detail.startswith("torch has no gradient for it"), report
    assert checked(own_optimizers("SGD(parameters, lr=0.1)", MASKED), FROZEN).verdict == "equal"


@pytest.mark.large
def test_a_parameter_that_jax_alone_has_frozen_has_no_name(checked: Checked) -> None:
    report = checked(own_optimizers("SGD(parameters, lr=0.1)", MASKED))
    (found,) = report.differences
    assert (found.stage, found.step, found.cause) == ("update", 1, None) and found.tensor.startswith("fc1.")
    assert found.detail == "frozen in the port: fc1.bias, fc1.weight"


@pytest.mark.large
def test_a_rate_that_changes_in_the_run_is_told_by_its_factor_and_step(checked: Checked) -> None:
    report = checked(own_optimizers("SGD(parameters, lr=0.1)", "optax.sgd(lambda count: 0.1 + 0.05 * (count > 0))"))
    (found,) = report.differences
    assert (found.stage, found.step, found.cause) == ("update", 2, None)
    assert found.detail == "1.5 times torch's in all tensors, from step 2 on"


@pytest.mark.large
def test_examples_that_differ_are_told_by_entry_replica_and_row(checked: Checked) -> None:
    jax = """
def flax_batch(step, rank):
    found = torch_batch(step, rank)
    return {**found, "y": np.roll(found["y"], rank)}
"""
    report = checked(("def batch(", "def torch_batch("), more=jax)
    first = report.differences[0]
    assert (first.stage, first.cause, first.detail[:16]) == ("samples", None, '"y" of replica 1')
    assert first.detail.endswith(": rolled by 1 row")


@pytest.mark.large
def test_a_fault_beside_a_constant_without_a_twin_is_named(checked: Checked) -> None:
    gelu = [(old, new.replace("tanh(", "gelu(").replace("torch.gelu", "F.gelu")) for old, new in SCALED[1:]]
    report = checked(SCALED[0], *gelu, more='no_twin = ["two"]\n')
    (found,) = report.differences
    assert found.cause is not None and found.cause.names == ("gelu_approximation",)


@pytest.mark.large
def test_equal_layers_send_to_the_loss(checked: Checked) -> None:
    report = checked(('batch["y"]).mean()', 'batch["y"]).mean() ** 1.01'))
    (found,) = report.differences
    assert (found.stage, found.cause, found.layer) == ("local_loss", None, None)
    assert found.detail == "all 3 layers that can be compared are equal: look after them, in the model or the loss"


@pytest.mark.large
def test_a_table_that_crosses_two_layers_is_told_beside_the_difference(checked: Checked) -> None:
    two = [("Linear(5, 4)", "Linear(5, 4); self.a, self.b = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)")]
    two += [("self.fc2(torch.tanh(self.fc1(x)))", "self.fc2(torch.tanh(self.a(y := self.fc1(x))) * self.b(y))")]
    two += [("5, 4, rngs=rngs)", "5, 4, rngs=rngs); self.a, self.b = (nnx.Linear(5, 5, rngs=rngs) for _ in range(2))")]
    two += [("self.fc2(nnx.tanh(self.fc1(x)))", "self.fc2(nnx.tanh(self.a(y := self.fc1(x))) * self.b(y))")]
    report = checked(*two, more='names = {"a": "b", "b": "a"}\n')
    says = "perhaps `names` crosses a and b: with the two swapped fc2 agrees"
    assert report.differences[0].detail.endswith(says) and says in " ".join(str(report).split())
    assert report.names == {"a": "a", "b": "b"}


@pytest.mark.large
def test_a_step_that_shows_another_loss_than_it_differentiates_is_told(checked: Checked) -> None:
    report = checked(more=step(("local_loss=value", 'local_loss=jax.lax.psum(value, "replica")')))
    (found,) = report.differences
    assert (found.stage, found.step, found.cause) == ("local_loss", 1, None)


@pytest.mark.large
def test_an_optimizer_that_cannot_be_replayed_leaves_a_step_of_ones_own_unjudged(checked: Checked) -> None:
    nadam = own_optimizers("NAdam(parameters, lr=0.01)", "optax.nadam(0.01)")
    report = checked(nadam, more=step())
    assert any("the optimizer of a flax_step is judged for SGD" in p.message for p in report.problems)
    assert report.verdict == "different"  # torch's NAdam has a schedule of its momentum: the run by itself shows it


def test_the_layer_where_the_forward_pass_parts_is_shown(checked: Checked) -> None:
    report = checked(("torch.tanh(", "F.gelu("), ("nnx.tanh(", "nnx.gelu("))
    (found,) = report.differences
    assert found.cause is not None and found.cause.names == ("gelu_approximation",)
    assert found.layer is not None
    assert (found.layer.torch, found.layer.jax, found.layer.before) == ("fc2", "fc2", "fc1")
    assert found.layer.input_residual is not None and found.layer.input_residual > 1e-6  # what lies between differs


@pytest.mark.large
def test_a_difference_stays_where_its_cause_cannot_be_looked_for(checked: Checked) -> None:
    """A loss that needs the replicas cannot be taken layer by layer."""
    loss = ('batch["y"]).mean()', 'batch["y"]).mean() * __import__("jax").lax.psum(1.0, "replica")')
    report = checked(loss)
    assert report.verdict == "different"
    assert report.differences[0].stage in ("local_loss", "local_gradients")
    assert report.differences[0].layer is None


@pytest.mark.large
def test_steps_that_are_right_one_by_one_and_do_not_add_up(checked: Checked) -> None:
    sgd = own_optimizers("SGD(parameters, lr=0.1)", "optax.sgd(0.1)")
    report = checked(sgd, more=HALVED + step(HALVES, LOSES_COUNT))
    (found,) = report.differences
    assert (found.stage, found.step, found.cause) == ("params", 2, None)
    assert "drifts from the reference when it runs on its own" in found.detail
    assert all(max(result.residuals) <= result.allowed for result in report.stages.values())
    assert checked(sgd, more=HALVED + step(HALVES)).verdict == "equal"
