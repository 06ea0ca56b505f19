"""Public name of jaxddp.nn.layers and jaxddp.nn.pooling: modules and functions with torch's definitions."""

from jaxddp.nn.layers import *  # noqa: F403
from jaxddp.nn.pooling import *  # noqa: F403
