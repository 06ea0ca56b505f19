"""torch.optim's optimizers and learning-rate schedules as optax gradient transformations."""

from jaxddp.optim.optimizers import adagrad, adam, adamw, clip_by_global_norm, from_config, rmsprop, sgd

__all__ = ["adagrad", "adam", "adamw", "clip_by_global_norm", "from_config", "rmsprop", "sgd"]
