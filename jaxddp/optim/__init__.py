"""torch.optim's optimizers and learning-rate schedules as optax gradient transformations."""

from jaxddp.optim.adam_variants import adamax, nadam, radam
from jaxddp.optim.elementwise import adadelta, asgd, rprop
from jaxddp.optim.groups import grouped
from jaxddp.optim.matrices import adafactor, muon
from jaxddp.optim.optimizers import adagrad, adam, adamw, clip_by_global_norm, from_config, rmsprop, sgd
from jaxddp.optim.plateau import observed, plateaus, reduce_on_plateau

__all__ = [
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "asgd",
    "clip_by_global_norm",
    "from_config",
    "grouped",
    "muon",
    "nadam",
    "observed",
    "plateaus",
    "radam",
    "reduce_on_plateau",
    "rmsprop",
    "rprop",
    "sgd",
]
