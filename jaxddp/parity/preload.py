"""Imports that take seconds, made once for all children of a check, which are forked from a process that made them.

Torch's ranks have jax among them and never use it: nearly every program imports both frameworks, and each rank would
spend 1.2 s on jax's import. The source of `torch_side` imports no jax.
"""

from jaxddp.parity.processes import import_quickly

import_quickly("torch._dynamo", "jaxddp.parity.checking")  # torch's optimizers import the first when one is made
