"""Configuration of a training run, without a framework."""

from jaxddp.config.config import TrainConfig, TrainerConfig

__all__ = ["TrainConfig", "TrainerConfig"]
