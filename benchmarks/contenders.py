"""Contenders of a workload with a number of replicas: which there are, and how each is built."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import jax

from benchmarks import in_jax, models_jax
from benchmarks.in_jax import Jaxddp
from benchmarks.in_torch import TorchJob
from benchmarks.jax_peers import ByHand, Way
from benchmarks.race import Contender
from benchmarks.torch_ranks import TorchRanks
from benchmarks.workloads import Workload
from jaxddp.nn.functional import Functional
from jaxddp.nn.torch_weights import to_torch

JAXDDP = "jaxddp"
ALL_PEERS_AT = 2  # replicas
SCANNED = 4  # steps per dispatch of the hand-written scan where jaxddp has no loop
LABELS = {
    JAXDDP: "jaxddp as it comes: jaxddp.train, or DistributedDataParallel for a module that the trainer does not have",
    "one_step": "jaxddp, 1 step per dispatch",
    "pmap": "pmap by hand, 1 step per dispatch",
    "pmap_scan": "pmap by hand, as many steps per dispatch as jaxddp; with convolutions 4, unrolled",
    "shard_map": "jit + shard_map by hand, 1 step per dispatch",
    "jit": "jax.jit on one device with the full batch, 1 step per dispatch",
    "jit_scan": "the same, several steps per dispatch",
    "torch": "torch DDP, data preloaded, fused optimizer",
    "torch_loader": "the same with torch's DataLoader and DistributedSampler",
    "torch_compile": "torch.compile of torch DDP, data preloaded, fused optimizer",
}
OF_TORCH = ("torch", "torch_loader", "torch_compile")


def names(workload: Workload, world_size: int, all_peers: bool = True) -> list[str]:
    """Return the contenders of a race.

    >>> from benchmarks.workloads import workloads
    >>> names(workloads()["mlp"], 8)
    ['jaxddp', 'pmap', 'torch']
    """
    chosen = [JAXDDP, "pmap", "torch"]
    if all_peers and world_size == ALL_PEERS_AT:
        chosen = list(LABELS)
        chosen.remove("jit_scan")
    elif all_peers and world_size == 1:
        chosen += ["jit", "jit_scan"]
    return [name for name in LABELS if name in chosen]


class Field:
    """Builder of the contenders of one race.

    Args:
        workload: what they train.
        devices: one device per replica.
        ranks: torch's processes, one per replica; None: torch takes no part.
    """

    def __init__(self, workload: Workload, devices: Sequence[jax.Device], ranks: TorchRanks | None):
        self._workload, self._devices, self._ranks = workload, devices, ranks
        self.jaxddp = self._jaxddp()

    @cached_property
    def steps_per_batch(self) -> int:
        """Steps that jaxddp makes with a batch of its loader; `jaxddp.step.dispatch` says in how many dispatches."""
        return len(self.jaxddp.train(1).losses)

    def builders(self, names: Sequence[str]) -> dict[str, Callable[[], Contender]]:
        """Return a function for each name that builds the contender."""
        return {name: partial(self._build, name) for name in names}

    def _build(self, name: str) -> Contender:
        if name == JAXDDP:
            return self.jaxddp
        if name == "one_step":
            return self._jaxddp(steps_per_dispatch=1)
        if name in OF_TORCH:
            return self._torch(name)
        loops = self.steps_per_batch > 1 and not self._workload.has_convolutions
        several = self.steps_per_batch if loops else SCANNED
        ways: dict[str, tuple[Way, int]] = {
            "pmap": ("pmap", 1),
            "pmap_scan": ("pmap", several),
            "shard_map": ("shard_map", 1),
            "jit": ("jit", 1),
            "jit_scan": ("jit", several),
        }
        way, steps = ways[name]
        return ByHand(self._workload, self._devices[:1] if way == "jit" else self._devices, way, steps)

    def _jaxddp(self, steps_per_dispatch: int | None = None) -> Jaxddp:
        if self._workload.config is None:
            return in_jax.module(self._workload, self._devices, steps_per_dispatch)
        platform = self._devices[0].platform
        return in_jax.trainer(self._workload, len(self._devices), platform, steps_per_dispatch)

    def _torch(self, name: str) -> Contender:
        assert self._ranks is not None, "torch takes part"
        start = Functional(models_jax.build(self._workload))
        weights = to_torch({**start.params, **start.buffers})
        options = {"compiled": name == "torch_compile", "data_loader": name == "torch_loader"}
        return self._ranks.build(TorchJob(self._workload, weights, **options))
