"""Options of a training run: declared, checked and grouped. Framework-free."""

from jaxddp.config.config import TrainConfig

__all__ = ["TrainConfig"]
