"""Examples of each process, by jaxddp's sampler and by torch's."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils import data

from examples.claims import Claim
from jaxddp.data import sampler
from jaxddp.data.sampler import shard_table

EXAMPLES, PROCESSES, BATCH_SIZE = 9, 2, 3  # few enough to show
MORE_PROCESSES = 4  # more than one of them repeats an example

SAMPLERS: Mapping[str, Any] = {"jax": sampler.DistributedSampler, "torch": data.DistributedSampler}


def dealt(framework: str, processes: int, drop_last: bool) -> np.ndarray:
    """Return the examples of each process without shuffling, (processes, examples per process)."""
    make = SAMPLERS[framework]
    ranks = range(processes)
    return np.array([list(make(range(EXAMPLES), processes, r, shuffle=False, drop_last=drop_last)) for r in ranks])


def tables(frameworks: Sequence[str]) -> str:
    """Format the tables of shards, with drop_last and without it."""
    blocks = []
    for drop_last in (False, True):
        for framework in frameworks:
            title = f"{'with' if drop_last else 'without'} drop_last, {framework}"
            blocks.append(f"{title}\n{shard_table(dealt(framework, PROCESSES, drop_last), BATCH_SIZE, EXAMPLES)}")
    return "\n\n".join(blocks)


def claims(frameworks: Sequence[str]) -> list[Claim]:
    """Claim which processes repeat examples, and that the order is fixed without set_epoch."""
    padded = {name: _padded(dealt(name, MORE_PROCESSES, drop_last=False)) for name in frameworks}
    moved = {name: _moved(SAMPLERS[name]) for name in frameworks}
    return [
        Claim(
            f"{EXAMPLES} examples on {MORE_PROCESSES} processes: not only the last process repeats one",
            all(count > 1 for count in padded.values()),
            **padded,
        ),
        Claim(
            "without set_epoch the next epoch moves no example",
            not any(moved.values()),
            **moved,
        ),
    ]


def alike() -> Claim:
    """Claim that jaxddp's shards equal torch's."""
    processes = range(1, EXAMPLES + 1)
    unlike = sum(
        not np.array_equal(dealt("jax", number, drop_last), dealt("torch", number, drop_last))
        for number in processes
        for drop_last in (False, True)
    )
    return Claim(f"{EXAMPLES} examples on 1 to {EXAMPLES} processes: no shard differs from torch's", not unlike, unlike)


def _padded(shards: np.ndarray) -> int:
    """Count the processes that have a repeated example."""
    places = np.arange(shards.size).reshape(shards.T.shape).T
    return int((places >= EXAMPLES).any(axis=1).sum())


def _moved(make: Any) -> int:
    shuffled = make(range(100), PROCESSES, 0, shuffle=True, seed=42)
    return int((np.array(list(shuffled)) != np.array(list(shuffled))).sum())
