"""Public name of jaxddp.nn.losses: losses of a batch and their sums."""

from jaxddp.nn.losses import *  # noqa: F403
