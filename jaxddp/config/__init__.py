"""Configuration of a training run, without a framework."""

from jaxddp.config.config import TrainConfig

__all__ = ["TrainConfig"]
