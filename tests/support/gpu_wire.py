"""Print the dtypes that a communication hook sends between eight H100s, from the program that XLA compiles.

    JAX_PLATFORMS=cpu PYTHONPATH=.venv/cuda-plugin .venv/bin/python tests/support/gpu_wire.py bf16_compress

This needs no GPU, but jax's CUDA plugin in the version of jax, which `make test-all` installs.
"""

import re
import sys

import jax
from jax import numpy as jnp
from jax.experimental import topologies

from jaxddp import comm_hooks
from jaxddp.distributed.replicas import Replicas

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84978434048
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

if __name__ == "__main__":
    devices = topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x8").devices
    hook = getattr(comm_hooks, sys.argv[1])()
    mean = Replicas(devices).map(lambda gradients: hook.reduce(gradients, ())[0], in_axes=(0,), out_axes=None)
    program = mean.lower({"w": jax.ShapeDtypeStruct((8, 1000), jnp.float32)}).compile().as_text()
    print(*re.findall(r"= (\w+)\S* all-reduce(?:-start)?\(", program))
