"""Claims about the script, measured in both frameworks."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from torch.distributed import is_initialized
from torch.utils.data import DistributedSampler as TorchSampler

from examples.arrays import furthest
from examples.claims import Claim
from examples.ddp_script.problem import TRAIN, Accuracy, Line, Run, Settings
from jaxddp import DistributedSampler

SAME = 1e-12  # in float64, relative; measured: 3e-16
SAMPLERS: tuple[Callable[..., Any], ...] = (DistributedSampler, TorchSampler)


def side_by_side(ours: Run, theirs: Run, settings: Settings) -> str:
    """Format both scripts' lines, with a verdict per line."""

    def line(ours: Line, theirs: Line) -> str:
        same = ours.text(settings.epochs) == theirs.text(settings.epochs)
        return f"{ours.text(settings.epochs)} | {theirs.loss:.6f}  {'equal' if same else 'DIFFERENT'}"

    return "\n".join(map(line, ours.lines, theirs.lines))


def of_runs(ours: Run, theirs: Run) -> list[Claim]:
    """Claim that both scripts do the same."""
    batches = [[(line.replica, line.epoch, line.rows) for line in run.lines] for run in (ours, theirs)]
    losses = [{str(n): np.array(line.loss) for n, line in enumerate(run.lines)} for run in (ours, theirs)]
    loss, weights = furthest(*losses), furthest(ours.weights, theirs.weights)
    return [
        Claim("every replica sees the same rows in every step; steps", batches[0] == batches[1], *map(len, batches)),
        Claim("every replica has the same loss in every step", loss < SAME, loss),
        Claim("the weights are the same afterwards", weights < SAME, weights),
    ]


def of_orders(settings: Settings) -> list[Claim]:
    """Claim that only set_epoch changes the order of the rows."""
    with_it, without = ([_orders(kind, settings, called) for kind in SAMPLERS] for called in (True, False))
    return [
        Claim(f"orders of {settings.epochs} epochs with set_epoch", set(with_it) == {settings.epochs}, *with_it),
        Claim("  without it every epoch repeats the first", set(without) == {1}, *without),
    ]


def _orders(kind: Callable[..., Any], settings: Settings, set_epoch: bool) -> int:
    """Count the different orders that a sampler draws."""
    samplers = _samplers(kind, settings)
    orders = set()
    for epoch in range(settings.epochs):
        for sampler in samplers if set_epoch else ():
            sampler.set_epoch(epoch)
        orders.add(tuple(tuple(sampler) for sampler in samplers))
    return len(orders)


def _samplers(kind: Callable[..., Any], settings: Settings) -> list[Any]:
    """Return each replica's sampler."""
    return [kind(range(len(TRAIN)), settings.devices, rank) for rank in range(settings.devices)]


def of_rows(ours: Run, theirs: Run, settings: Settings) -> list[Claim]:
    """Claim how many rows an epoch has after the sampler's padding, and how many drop_last leaves."""
    padded = [sum(map(len, _samplers(kind, settings))) for kind in SAMPLERS]
    trained = [len({row for line in run.lines if line.epoch == 0 for row in line.rows}) for run in (ours, theirs)]
    return [
        Claim("5 rows are padded to divide among 2 replicas; rows", set(padded) == {6}, *padded),
        Claim("  drop_last then drops two of them; rows", set(trained) == {4}, *trained),
    ]


def of_accuracy(ours: Run, theirs: Run) -> list[Claim]:
    """Claim how many rows each accuracy counts."""

    def claim(says: str, accuracy: Callable[[Run], Accuracy], counted: int) -> Claim:
        jax, torch = accuracy(ours), accuracy(theirs)
        return Claim(says, jax == torch and jax.counted == counted, str(jax), str(torch))

    return [
        claim("training accuracy, each row counted once", lambda run: run.train, 5),
        claim("  over the training loader: some rows are missing", lambda run: run.by_loader[True], 4),
        claim("  over the loader without drop_last: one row counts twice", lambda run: run.by_loader[False], 6),
        claim("test accuracy, each row counted once", lambda run: run.test, 2),
    ]


def of_processes(ours: Run, theirs: Run) -> list[Claim]:
    """Claim how many processes train, and that none is left behind."""
    started = [run.processes - {os.getpid()} for run in (ours, theirs)]
    left = [sum(map(_is_running, processes)) for processes in started]
    numbers = [len(run.processes) for run in (ours, theirs)]
    return [
        Claim("JAX trains in a single process; processes", not started[0], *numbers),
        Claim("no process or process group is left behind; processes", not any(left) and not is_initialized(), *left),
    ]


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
