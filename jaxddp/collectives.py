"""Public name of jaxddp.distributed.collectives: torch.distributed's collectives."""

from jaxddp.distributed.collectives import *  # noqa: F403
