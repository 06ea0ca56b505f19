"""Lines of the user's files for causes of an update, and for an update without a cause."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.diagnosis.cause_lines import with_optimizer_lines
from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.diagnosis.search.decide import Hypothesis, Ruling
from jaxddp.parity.jax_side.optimizer_line import JaxOptimizerLine
from jaxddp.parity.operations import Lines, Moments, OptimizerLines, SourceLine, moments

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
    assert lines_of(faults, JAX, TORCH) == lines


def lines_of(faults: tuple[str, ...], jax: OptimizerLines, torch: OptimizerLines) -> tuple[Lines, ...]:
    workers: Any = SimpleNamespace(
        jax=SimpleNamespace(do=lambda job: jax if isinstance(job, JaxOptimizerLine) else {}),
        torch=SimpleNamespace(do=lambda job: (torch,)),
    )
    case, judgement = SimpleNamespace(torch_source=None), SimpleNamespace(first={"update": SimpleNamespace(step=2)})
    facts = SimpleNamespace(clips_inside=False)
    evidence: Any = SimpleNamespace(case=case, start=None, facts=facts, judgement=judgement)
    ruling = (
        Ruling((Hypothesis(tuple(Deviation(fault, Statement("")) for fault in faults), 0.0),), None) if faults else None
    )
    return with_optimizer_lines(evidence, InterruptibleSearches(workers, []), ruling, "fc.weight").lines


def rates(file: str, *values: float) -> tuple[tuple[SourceLine, Moments], ...]:
    return tuple((SourceLine(file, 50 + k), moments(np.array(x))) for k, x in enumerate(values))


def test_a_schedule_quotes_the_lines_that_first_compute_other_numbers() -> None:
    jax, torch = (
        JAX._replace(rates=rates("port_jax.py", 3.0, 0.5, 0.1)),
        TORCH._replace(rates=rates("port_torch.py", 3.0, 0.7)),
    )
    apart = Lines(SourceLine("port_jax.py", 51), SourceLine("port_torch.py", 51))
    assert lines_of(("schedule",), jax, torch) == (apart,)
    assert lines_of(("schedule",), jax, TORCH) == (SCHEDULE,)  # torch's schedule is a library's
    assert lines_of((), jax, torch) == (OPTIMIZER,)  # the update may differ for another reason


def test_a_rate_that_is_no_number_quotes_the_line_that_computes_it() -> None:
    jax = JAX._replace(rates=rates("port_jax.py", 3.0, np.nan, np.nan))
    torch = TORCH._replace(rates=rates("port_torch.py", 3.0, 0.7))
    assert lines_of((), jax, torch) == (Lines(SourceLine("port_jax.py", 51), SourceLine("port_torch.py", 51)),)
