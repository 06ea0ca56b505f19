"""Print the dtypes that a communication hook sends between eight H100s, from the program that XLA compiles.

    JAX_PLATFORMS=cpu PYTHONPATH=.venv/cuda-plugin .venv/bin/python tests/support/gpu_wire.py bf16_compress

This needs no GPU, but jax's CUDA plugin in the version of jax, which `make test-all` installs.
"""

import re
import sys

import jax
from jax import numpy as jnp

from jaxddp import comm_hooks
from jaxddp.config.hardware import GPUS
from jaxddp.distributed.replicas import Replicas
from jaxddp.plan import topology

if __name__ == "__main__":
    devices = topology.gpus(GPUS["h100"], 8, 1)
    hook = getattr(comm_hooks, sys.argv[1])()
    mean = Replicas(devices).map(lambda gradients: hook.reduce(gradients, ())[0], in_axes=(0,), out_axes=None)
    program = mean.lower({"w": jax.ShapeDtypeStruct((8, 1000), jnp.float32)}).compile().as_text()
    print(*re.findall(r"= (\w+)\S* all-reduce(?:-start)?\(", program))
