"""Public name of jaxddp.optim.schedules: torch's learning-rate schedules."""

from jaxddp.optim.schedules import *  # noqa: F403
