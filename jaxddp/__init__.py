"""Data-parallel training in JAX with the semantics of PyTorch's DistributedDataParallel.

    from jaxddp import DistributedDataParallel, Loader, Replicas, optim, prepare

Names are imported lazily, on first use: `prepare` can still choose the devices after `import jaxddp`, and
torch_ref can read the configuration without importing jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxddp import collectives, layers, losses, optim, schedules, train
    from jaxddp.config import TrainConfig
    from jaxddp.data.sampler import DistributedSampler
    from jaxddp.data_parallel import DistributedDataParallel
    from jaxddp.distributed.devices import prepare
    from jaxddp.distributed.replicas import Replicas, VirtualReplicas
    from jaxddp.errors import InputError, TrainingError
    from jaxddp.loader import Loader
    from jaxddp.nn.losses import Losses, cross_entropy
    from jaxddp.step.metrics import means

_MODULES = {"collectives", "layers", "losses", "optim", "schedules", "train"}
_HOMES = {
    "DistributedDataParallel": "data_parallel",
    "DistributedSampler": "data.sampler",
    "InputError": "errors",
    "Loader": "loader",
    "Losses": "nn.losses",
    "Replicas": "distributed.replicas",
    "TrainConfig": "config",
    "TrainingError": "errors",
    "VirtualReplicas": "distributed.replicas",
    "cross_entropy": "nn.losses",
    "means": "step.metrics",
    "prepare": "distributed.devices",
}

__all__ = [
    "DistributedDataParallel",
    "DistributedSampler",
    "InputError",
    "Loader",
    "Losses",
    "Replicas",
    "TrainConfig",
    "TrainingError",
    "VirtualReplicas",
    "collectives",
    "cross_entropy",
    "layers",
    "losses",
    "means",
    "optim",
    "prepare",
    "schedules",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"jaxddp.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"jaxddp.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'jaxddp' has no attribute '{name}'")
