"""GPUs to plan for: numbers from their makers and NCCL, and the shares of these that programs reach.

All constants of the plan's model are in this file. The shares are assumptions: nothing here was measured by jaxddp.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jaxddp.errors import check_name

# Shares of the peak that long kernels reach; typical of tuned libraries, and assumed here.
MATRIX_SHARE = 0.70  # cuBLAS on large bf16 products
CONVOLUTION_SHARE = 0.50  # cuDNN on the convolutions of a ResNet
MEMORY_SHARE = 0.85  # elementwise kernels and reductions
KERNEL_SECONDS = 2e-6  # from one kernel to the next
# Shares of a link's bandwidth that large NCCL messages reach. 8 H100s: 450 GB/s a direction, 460 to 480 GB/s of bus
# bandwidth by nccl-tests, whose reduction in the switch (NVLS) beats a ring.
NVLINK_SHARE, NETWORK_SHARE = 0.80, 0.85

# NCCL's model, src/graph/tuning.cc, ring with the Simple protocol: seconds per message, and per step of the ring.
NCCL_BASE_SECONDS, NVLINK_STEP_SECONDS, NETWORK_STEP_SECONDS = 8.4e-6, 3.4e-6, 14e-6

# Share of the memory that jax takes unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise (docs.jax.dev,
# gpu_memory_allocation.html).
JAX_MEMORY_SHARE = 0.75

GPUS_PER_NODE = 8  # DGX and HGX machines


@dataclass(frozen=True)
class GPU:
    """A GPU with its links.

    Attributes:
        name: name of the device.
        source: document of the maker with these numbers.
        peak: dense floating-point operations per second by dtype of the operands; "" is the key of others, without
            tensor cores.
        memory_bandwidth: bytes per second.
        memory: bytes.
        nvlink: bytes per second that a GPU sends to the others of its node.
        network: bytes per second that a GPU sends to other nodes: its InfiniBand adapter.
        capability: compute capability.
        cores: streaming multiprocessors.
        clock: GHz.
        shared_memory: bytes per streaming multiprocessor.
        l2_cache: bytes.
    """

    name: str
    source: str
    peak: Mapping[str, float] = field(repr=False)
    memory_bandwidth: float
    memory: int
    nvlink: float
    network: float
    capability: tuple[int, int]
    cores: int
    clock: float
    shared_memory: int
    l2_cache: int

    @property
    def usable_memory(self) -> float:
        """Bytes that jax takes by default."""
        return JAX_MEMORY_SHARE * self.memory

    def flops_per_second(self, dtype: str) -> float:
        """Return the peak for products of a dtype."""
        return self.peak.get(dtype, self.peak["f32"])

    @property
    def target_config(self) -> str:
        """Description for which XLA compiles without the GPU: `stream_executor.GpuTargetConfigProto` as text."""
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  core_count: {self.cores} fpus_per_core: {128 if major == 9 else 64} clock_rate_ghz: {self.clock}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory} shared_memory_per_block_optin: {self.shared_memory - 1024}
  memory_bandwidth: {int(self.memory_bandwidth)} l2_cache_size: {self.l2_cache} device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{self.name}"
"""


_A100 = GPU(
    name="NVIDIA A100-SXM4-80GB",
    source="NVIDIA A100 80GB datasheet (SXM); InfiniBand HDR, 200 Gb/s per GPU (DGX A100 datasheet)",
    peak={"bf16": 312e12, "f16": 312e12, "tf32": 156e12, "f32": 19.5e12, "f64": 19.5e12},
    memory_bandwidth=2.039e12,
    memory=85_095_874_560,
    nvlink=300e9,
    network=25e9,
    capability=(8, 0),
    cores=108,
    clock=1.41,
    shared_memory=167_936,
    l2_cache=41_943_040,
)
_H100 = GPU(
    name="NVIDIA H100 80GB HBM3",
    source="NVIDIA H100 datasheet (SXM); InfiniBand NDR, 400 Gb/s per GPU (DGX H100 datasheet)",
    peak={"bf16": 989.4e12, "f16": 989.4e12, "tf32": 494.7e12, "f32": 66.9e12, "f64": 66.9e12},
    memory_bandwidth=3.352e12,
    memory=84_978_434_048,
    nvlink=450e9,
    network=50e9,
    capability=(9, 0),
    cores=132,
    clock=1.98,
    shared_memory=233_472,
    l2_cache=52_428_800,
)
_H200 = replace(  # an H100 with more memory
    _H100,
    name="NVIDIA H200",
    source="NVIDIA H200 datasheet (SXM); InfiniBand NDR, 400 Gb/s per GPU (DGX H200 datasheet)",
    memory_bandwidth=4.8e12,
    memory=150_754_820_096,
    l2_cache=62_914_560,
)
GPUS = {"a100": _A100, "h100": _H100, "h200": _H200}


def gpu_named(name: str) -> GPU:
    """Return a GPU by its short name; raise `InputError` for another.

    >>> gpu_named("h100").flops_per_second("bf16")
    989400000000000.0
    """
    check_name("--gpu", name, GPUS)
    return GPUS[name]
