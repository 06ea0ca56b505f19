"""A check that looks for no causes: the same verdict, sooner."""

from pathlib import Path

import pytest

from jaxddp.parity.checking import check
from jaxddp.parity.diagnosis.differences import NOT_SEARCHED
from jaxddp.parity.findings import Difference
from jaxddp.parity.workers import Workers
from tests.support.small_port import Change, own_optimizers, step, write

SUMMED: Change = ('batch["y"]).mean()', 'batch["y"]).sum()')
DECAYED = own_optimizers("AdamW(parameters, lr=0.01)", "optax.adamw(0.01, weight_decay=0.1)")
FAILS: Change = ("def jax_model():", 'def jax_model():\n    raise ValueError("no such model")')


def difference_in(stage: str, differences: tuple[Difference, ...]) -> Difference:
    return next(difference for difference in differences if difference.stage == stage)


@pytest.mark.one_in(4, first=1)
@pytest.mark.parametrize(
    ("changes", "more", "verdict"),
    [
        ([], "", "equal"),
        ([SUMMED], "", "different"),
        ([DECAYED], "", "different"),
        ([], step(("jax.lax.pmean", "(lambda x, _: x)")), "different"),
        ([FAILS], "", "incomplete"),
    ],
    ids=["equal", "loss", "update", "own step", "failing"],
)
def test_the_verdict_is_the_same_without_causes(
    changes: list[Change], more: str, verdict: str, workers: Workers, tmp_path: Path
) -> None:
    port = write(tmp_path, *changes, more=more)
    explained, quick = (
        check(port, world_size=2, steps=2, workers=workers, numerics=False, causes=causes) for causes in (True, False)
    )
    assert quick.verdict == explained.verdict == verdict
    assert quick.problems == explained.problems
    assert quick.stages == explained.stages
    assert all(not one.cause and one.needs == NOT_SEARCHED for one in quick.differences)
    assert "no known fault" not in str(quick)
    if verdict == "different":
        stage = explained.differences[0].stage
        at, of = (difference_in(stage, report.differences) for report in (quick, explained))
        assert (at.step, at.tensor, at.residual) == (of.step, of.tensor, of.residual)
        assert of.cause is not None
