"""Differences without a name are told with their place, and with what their tensors have in common."""

import re

import pytest

from jaxddp.parity.report.sentences import sentences
from tests.support.checks import FROZEN, SCALED, Checked
from tests.support.small_port import PORT, Change, own_optimizers, step

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
FORGETS_TO_COUNT = HALVED + step(HALVES, ("TrainState(state.step + 1,", "TrainState(state.step,"))
LINE = next(number for number, line in enumerate(PORT.splitlines(), start=1) if "return self.fc2(nnx" in line)
CAST = f"jax computes in {{}} at port.py: line {LINE}, and torch does not"

SGD = own_optimizers("SGD(parameters, lr=0.1)", "optax.sgd(0.1)")
STAYS = own_optimizers("SGD(parameters, lr=0.1)", MASKED)
OTHER_RATE = own_optimizers("SGD(parameters, lr=0.1)", "optax.sgd(lambda count: 0.1 + 0.05 * (count > 0))")
ANOTHER = 'type("Another", (torch.optim.SGD,), {})(parameters, lr=0.1)'
RATE_OF_ANOTHER = OTHER_RATE[0], OTHER_RATE[1].replace("torch.optim.SGD(parameters, lr=0.1)", ANOTHER)
BATCH = ("def batch(", "def torch_batch(")
ROLLED = """
def jax_batch(step, rank):
    found = torch_batch(step, rank)
    return {**found, "y": np.roll(found["y"], 2 * rank)}
"""
SHOWS_A_SUM = step(("local_loss=value", 'local_loss=jax.lax.psum(value, "replica")'))
ADDED = ("nnx.tanh(self.fc1(x))", "nnx.tanh(self.fc1(x) + 0.001 * (x**3).sum(-1, keepdims=True))")
IN_BFLOAT16 = ("nnx.tanh(self.fc1(x))", 'nnx.tanh(self.fc1(x).astype("bfloat16"))')
IN_FLOAT16 = ("nnx.Linear(5, 4, rngs", 'nnx.Linear(5, 4, dtype="float16", rngs')
# Changes; what the two sides compute where they differ.
EXPRESSIONS = {
    "power": ([('batch["y"]).mean()', 'batch["y"]).mean() ** 1.01')], "cross_entropy(...) ** 1.01 instead of "),
    "a further term": ([ADDED], "added: fc1(...) + (0.001 * sum((x ** 3))) instead of fc1(...), in tanh"),
    "cast": ([IN_BFLOAT16], "added: bfloat16(fc1(...)) instead of fc1(...), in tanh"),
}
# Changes, more of the port; stage and step of the first difference, the start of its tensor, and what is said of it.
LOCATED = {
    "rate of an optimizer that torch does not have": (
        [RATE_OF_ANOTHER],
        "",
        "update",
        2,
        "",
        "1.5 times torch's in all tensors, from step 2 on",
    ),
    "examples": ([BATCH], ROLLED, "samples", 1, "", '"y" of replica 1.*: rolled by 2 rows'),
    "shown loss": ([], SHOWS_A_SUM, "local_loss", 1, "", ".*"),
    "cast in a layer": ([IN_FLOAT16], "", "local_loss", 1, "", CAST.format("float16")),
    "drift": ([SGD], FORGETS_TO_COUNT, "params", 2, "", ".*drifts from the reference when it runs on its own.*"),
}


def test_a_rate_that_changes_in_the_port_alone_is_named(checked: Checked) -> None:
    (found,) = checked(OTHER_RATE).differences
    assert found.stage == "update" and found.cause is not None and found.cause.names == ("schedule",)
    (says,) = sentences(found.cause)
    assert says == "the learning rate is 0.15 at step 2, the reference's 0.1; it differs at 2 of 3 steps"


def test_a_layer_that_is_frozen_in_the_port_alone_is_named(checked: Checked) -> None:
    (found,) = checked(STAYS).differences
    assert found.stage == "update" and found.cause is not None and found.cause.names == ("rate_of_some",)
    assert sentences(found.cause) == ("not updated in the port: fc1.bias, fc1.weight",)


def test_a_layer_that_is_frozen_in_torch_alone_is_named(checked: Checked) -> None:
    (found,) = checked(SGD, FROZEN).differences
    assert (found.stage, found.step) == ("update", 1) and found.detail.startswith("torch has no gradient for it")
    assert found.cause is not None
    assert sentences(found.cause) == ("updated in the port alone: fc1.bias, fc1.weight",)
    assert "optax.set_to_zero()" in found.cause.fixes[0]


def test_a_second_fault_beside_a_layer_that_is_frozen_in_torch_alone_is_not_passed_over(checked: Checked) -> None:
    (found,) = checked(own_optimizers("SGD(parameters, lr=0.1)", "optax.sgd(0.11)"), FROZEN).differences
    assert found.stage == "update" and (found.cause is None or found.cause.names != ("rate_of_some",)), found


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("changes", "more", "stage", "step", "tensor", "detail"), LOCATED.values(), ids=LOCATED)
def test_a_difference_without_a_name_is_located(
    changes: list[Change], more: str, stage: str, step: int, tensor: str, detail: str, checked: Checked
) -> None:
    report = checked(*changes, more=more)
    found, *others = [difference for difference in report.differences if difference.stage != "types"]
    assert (found.stage, found.step, found.cause) == (stage, step, None)
    assert found.tensor.startswith(tensor) and re.fullmatch(detail, found.detail), report
    if stage == "params":
        assert all(max(result.residuals) <= result.allowed for result in report.stages.values())
    assert not others or stage == "samples"


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("changes", "says"), EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_a_difference_without_a_name_is_said_as_code(changes: list[Change], says: str, checked: Checked) -> None:
    (found,) = [difference for difference in checked(*changes).differences if difference.stage != "types"]
    assert (found.stage, found.step) == ("local_loss", 1) and found.cause is not None
    assert {*found.cause.names} <= {"other_expression", "call_added"} and sentences(found.cause)[0].startswith(says), (
        found
    )


@pytest.mark.large
@pytest.mark.parametrize(
    ("changes", "more"), [([STAYS, FROZEN], ""), ([SGD], HALVED + step(HALVES))], ids=["frozen", "halved rate"]
)
def test_what_is_right_beside_it_is_equal(changes: list[Change], more: str, checked: Checked) -> None:
    assert checked(*changes, more=more).verdict == "equal"


@pytest.mark.large
def test_a_fault_beside_a_constant_without_a_twin_is_named(checked: Checked) -> None:
    gelu = [(old, new.replace("tanh(", "gelu(").replace("torch.gelu", "F.gelu")) for old, new in SCALED[1:]]
    report = checked(SCALED[0], *gelu, more='no_twin = ["two"]\n')
    (found,) = report.differences
    assert found.cause is not None and found.cause.names == ("gelu_approximation",)


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
def test_an_optimizer_that_cannot_be_replayed_leaves_a_step_of_ones_own_unjudged(checked: Checked) -> None:
    lion = own_optimizers("SGD and type('Lion', (torch.optim.SGD,), {})(parameters, lr=0.01)", "optax.lion(0.01)")
    report = checked(lion, more=step())
    assert any("the optimizer of a jax_step is judged if torch.optim has it" in p.message for p in report.problems)
    assert report.verdict == "different"  # the run by itself shows it


@pytest.mark.large
def test_optaxs_rule_is_named_in_a_step_of_ones_own(checked: Checked) -> None:
    """Torch's NAdam has a schedule of its momentum."""
    (found,) = checked(own_optimizers("NAdam(parameters, lr=0.01)", "optax.nadam(0.01)"), more=step()).differences
    assert found.cause is not None and found.cause.names == ("optax_rule",)
    assert found.cause.fixes[0].startswith("use torch's rule: jaxddp.optim.nadam(lr, ")


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
