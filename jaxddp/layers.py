"""Public name of jaxddp.nn.layers: flax modules with torch's parameters, defaults and random numbers."""

from jaxddp.nn.layers import *  # noqa: F403
