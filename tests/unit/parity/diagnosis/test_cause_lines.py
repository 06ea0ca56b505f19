"""Lines of the user's files for causes of an update, and for an update without a cause."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxddp.parity.deviation import Deviation
from jaxddp.parity.diagnosis.cause_lines import with_optimizer_lines
from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.diagnosis.search.decide import Hypothesis, Ruling
from jaxddp.parity.jax_side.optimizer_line import JaxOptimizerLine
from jaxddp.parity.operations import Lines, OptimizerLines, SourceLine

JAX = OptimizerLines(SourceLine("port_jax.py", 10), SourceLine("port_jax.py", 20))
TORCH = OptimizerLines(SourceLine("port_torch.py", 30), SourceLine("port_torch.py", 40))
OPTIMIZER, SCHEDULE = Lines(JAX.optimizer, TORCH.optimizer), Lines(JAX.schedule, TORCH.schedule)


@pytest.mark.parametrize(
    ("faults", "lines"),
    [
        ((), (OPTIMIZER,)),
        (("betas",), (OPTIMIZER,)),
        (("schedule",), (SCHEDULE,)),
        (("clip_norm",), (OPTIMIZER,)),
        (("decay_value", "warmup_start"), (OPTIMIZER, SCHEDULE)),
    ],
    ids=["no cause", "optimizer", "schedule", "clipping", "both"],
)
def test_a_fault_of_an_update_quotes_the_optimizers_or_the_schedules_lines(
    faults: tuple[str, ...], lines: tuple[Lines, ...]
) -> None:
    workers: Any = SimpleNamespace(
        jax=SimpleNamespace(do=lambda job: JAX if isinstance(job, JaxOptimizerLine) else {}),
        torch=SimpleNamespace(do=lambda job: (TORCH,)),
    )
    case = SimpleNamespace(torch_source=None)
    evidence: Any = SimpleNamespace(case=case, start=None, facts=SimpleNamespace(clips_inside=False))
    ruling = Ruling((Hypothesis(tuple(Deviation(fault, "") for fault in faults), 0.0),), None) if faults else None
    found = with_optimizer_lines(evidence, InterruptibleSearches(workers, []), ruling, "fc.weight")
    assert found.lines == lines
