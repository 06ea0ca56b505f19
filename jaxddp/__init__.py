"""Data-parallel training in JAX with the semantics of PyTorch's DistributedDataParallel.

    from jaxddp import DataParallel, Loader, Replicas, optim, prepare

Importing the package starts nothing: each name is loaded when it is first used, so that
`prepare` can still choose the devices, and torch_ref can read the configuration without jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxddp import optim, schedules
    from jaxddp.config import TrainConfig
    from jaxddp.data_parallel import DataParallel
    from jaxddp.devices import prepare
    from jaxddp.errors import InputError, TrainingError
    from jaxddp.loader import Loader
    from jaxddp.losses import Losses, cross_entropy
    from jaxddp.metrics import means
    from jaxddp.replicas import Replicas, VirtualReplicas
    from jaxddp.sampler import DistributedSampler

__all__ = [
    "DataParallel",
    "DistributedSampler",
    "InputError",
    "Loader",
    "Losses",
    "Replicas",
    "TrainConfig",
    "TrainingError",
    "VirtualReplicas",
    "cross_entropy",
    "means",
    "optim",
    "prepare",
    "schedules",
]

_MODULES = {
    "DataParallel": "data_parallel",
    "DistributedSampler": "sampler",
    "InputError": "errors",
    "Loader": "loader",
    "Losses": "losses",
    "Replicas": "replicas",
    "TrainConfig": "config",
    "TrainingError": "errors",
    "VirtualReplicas": "replicas",
    "cross_entropy": "losses",
    "means": "metrics",
    "prepare": "devices",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"jaxddp.{_MODULES[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"jaxddp.{name}")
    raise AttributeError(f"module 'jaxddp' has no attribute '{name}'")
