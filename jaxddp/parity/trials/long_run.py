"""A thousand steps of both optimizers, each by itself, on the same gradients."""

import math
from dataclasses import replace

from jaxddp.parity.cases import PortCase
from jaxddp.parity.compare.judge import Located
from jaxddp.parity.compare.residuals import residuals
from jaxddp.parity.coverage import Trial
from jaxddp.parity.jax_side.long_run import JaxUpdates
from jaxddp.parity.port.variants import Variant
from jaxddp.parity.sums import folded
from jaxddp.parity.torch_side.long_run import TorchUpdates
from jaxddp.parity.torch_side.rank import rank_folder
from jaxddp.parity.trials.runs import TrialRuns, Tried

STEPS = 1000
ALLOWED = 1e-8  # of the parameters; measured for Adam, SGD and RMSprop: up to 4e-14, and 0.1 of `MadeRun.slack`
LONG = Trial("optimizer_state", f"after {STEPS:,} steps of the optimizer alone")


def after_many_steps(trials: TrialRuns) -> Tried:
    """Return the trial with what differs in it.

    Raises:
        ChildError: a side fails.
    """
    runs, workers, case = trials.runs, trials.workers, trials.case
    assert isinstance(case, PortCase)
    folder, *_ = trials.folders()
    made = trials.made_run([Variant(step=step) for step in range(case.steps)], gives_gradients=True)
    made.write(folder, 1)
    gradients = rank_folder(folder, 0)
    factors = tuple(1 + math.sin(step) / 2 for step in range(STEPS))  # the sum of gradients does not repeat
    workers.jax.start(JaxUpdates(case, runs.start, gradients, factors))
    try:
        (torch,) = workers.torch.do(TorchUpdates(case.torch_source, case.steps, runs.start, gradients, factors))
    finally:
        jax = workers.jax.wait()
    tried = Tried(Variant(LONG), LONG, {}, 0, ())
    if torch is None:
        return replace(tried, trial=replace(LONG, left_out="its rate has a schedule, which is compared by itself"))
    summed = {**folded("params", torch, runs.summands)}
    slack = max(made.slack(step, factor) for step in range(case.steps) for factor in (min(factors), max(factors)))
    located = Located.worst(STEPS, residuals({name: jax[name] for name in summed}, summed), ALLOWED + slack)
    return tried if located.residual <= located.allowed else replace(tried, differing={"params": located})
