"""The check: both sides through the same steps, every stage compared, and differences explained.

torch by itself, float64   the reference
jax forced by it           each stage given the same inputs
jax by itself              state, schedule, sampler, restore
both forced, float32       rounding, each against its own float64 run
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from jaxddp.parity.case import Case, PortCase
from jaxddp.parity.findings import Report
from jaxddp.parity.run import Run
from jaxddp.parity.torch_side import PortFile, PortSource
from jaxddp.parity.workers import Workers


def check(
    port: str | Path | PortSource | Case,
    *,
    world_size: int = 2,
    steps: int = 10,
    seed: int = 0,
    platform: str | None = None,
    timeout: float = 300.0,
    numerics: bool = True,
    workers: Workers | None = None,
) -> Report:
    """Whether a port trains as its torch original does, and why not.

    Args:
        port: a port file; or anything else that becomes a port in another process; or a case of a built-in model,
            which brings its own world size and steps.
        world_size: number of replicas, on either side.
        steps: optimizer steps.
        seed: from which torch draws the weights.
        platform: "cpu", "gpu", or None for GPUs where there are any; of jax.
        timeout: seconds without a word from a process after which it counts as hanging.
        numerics: run in float32 too.
        workers: processes that stay up from check to check; None: new ones.

    Example:
        report = jaxddp.parity.check("my_port.py")
        assert report.verdict == "equal", report
    """
    started = time.monotonic()
    source = PortFile(str(port)) if isinstance(port, str | Path) else port
    case = source if isinstance(source, Case) else PortCase(source, world_size, steps, seed=seed)
    with _own(workers, case.world_size, platform, timeout) as crew:
        report = Run(case, crew, seed).make(numerics)
    return replace(report, seconds=time.monotonic() - started)


@contextmanager
def _own(workers: Workers | None, world_size: int, platform: str | None, timeout: float) -> Iterator[Workers]:
    if workers is not None:
        yield workers
        return
    with Workers(world_size, platform, timeout) as crew:
        yield crew
