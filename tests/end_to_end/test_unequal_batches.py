"""Batches that differ in length between ranks: the mean over ranks of each rank's own mean, as DDP computes it."""

import pytest

from tests.support.checks import Checked
from tests.support.small_port import SHOWS_NOTHING, UNEQUAL, Change, step

MEAN = 'jax.lax.pmean(local, "replica")'
# Every example weighs the same, whichever rank has it.
BY_EXAMPLES = """(lambda n: jax.tree.map(
        lambda g: jax.lax.psum(n * g, "replica") / jax.lax.psum(n, "replica"), local
    ))(jax.numpy.where(state.step % 2, 12, 12 // (1 + jax.lax.axis_index("replica"))))"""
WIDTHS: list[Change] = [("(12, 3)", "(12, 3 + 2 * rank)"), ('model(batch["x"])', 'model(batch["x"][:, :3])')]
LOSS = 'cross_entropy(model(batch["x"]), batch["y"]).mean()'
OTHER_ENTRIES: Change = (
    '"y": rng.integers(0, 4, size)}',
    '"y": rng.integers(0, 4, size)} | ({"z": np.ones(size)} if rank else {})',
)
COMMUNICATES = f'__import__("jax").lax.pmean({LOSS}, "replica")'


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "more",
    ["", "accumulation_steps = 3\n", 'loss_normalization = "global"\n', step()],
    ids=["plain", "accumulation", "global", "own step"],
)
def test_a_right_port_is_equal_at_every_stage(more: str, checked: Checked) -> None:
    report = checked(UNEQUAL, more=more, numerics=True)
    assert report.verdict == "equal", report
    assert {"samples", "local_loss", "local_gradients", "gradients", "update"} <= report.stages.keys()
    assert all(len(result.residuals) == report.steps for result in report.stages.values())


def test_ranks_may_pad_to_widths_of_their_own(checked: Checked) -> None:
    report = checked(*WIDTHS)
    assert report.verdict == "equal", report


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("shows", "name"),
    [([], "global_mean"), ([(SHOWS_NOTHING[0], '("gradients",)')], "global_mean"), ([SHOWS_NOTHING], None)],
    ids=["all stages", "gradients", "nothing"],
)
def test_a_mean_over_all_examples_is_different(shows: list[Change], name: str | None, checked: Checked) -> None:
    report = checked(UNEQUAL, more=step((MEAN, BY_EXAMPLES), *shows))
    (difference,) = report.differences
    assert difference.stage == ("gradients" if name else "update")
    assert (difference.cause and difference.cause.names) == (name and (name,)), report


def test_a_fault_in_the_model_is_named(checked: Checked) -> None:
    report = checked(UNEQUAL, ("nnx.tanh(", "nnx.relu("))
    assert report.differences[0].cause and report.differences[0].cause.names == ("other_function",), report


@pytest.mark.parametrize(
    ("changes", "more", "says"),
    [
        ([(LOSS, COMMUNICATES)], "", "jax_loss: communicates between replicas whose batches differ in shape"),
        ([], step((MEAN, f"{MEAN} if len(batch['x']) else 0")), "jax_step: reads the batch, whose shapes differ"),
        ([OTHER_ENTRIES], "", "batch(0, 1): must have the entries of rank 0, x, y; has x, y, z"),
    ],
    ids=["loss", "own step", "entries"],
)
def test_what_cannot_be_compared_is_refused_in_a_line(
    changes: list[Change], more: str, says: str, checked: Checked
) -> None:
    (problem,) = checked(UNEQUAL, *changes, more=more).problems
    assert problem.side == "jax" and problem.message.startswith(says) and "\n" not in problem.message
