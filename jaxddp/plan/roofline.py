"""Time of a kernel on one GPU: the longer of its arithmetic and its memory traffic."""

from jaxddp.config.hardware import CONVOLUTION_SHARE, GPU, KERNEL_SECONDS, MATRIX_SHARE, MEMORY_SHARE
from jaxddp.plan.costs import Cost


def arithmetic_seconds(cost: Cost, gpu: GPU) -> float:
    """Return the time of the floating-point operations at the achievable share of the peak."""
    peak = gpu.flops_per_second(cost.dtype)
    products = cost.matrix / MATRIX_SHARE / peak + cost.convolution / CONVOLUTION_SHARE / peak
    return products + cost.rest / gpu.flops_per_second("f32")


def memory_seconds(cost: Cost, gpu: GPU) -> float:
    """Return the time of the memory traffic at the achievable share of the bandwidth."""
    return cost.bytes / (MEMORY_SHARE * gpu.memory_bandwidth)


def seconds(cost: Cost, gpu: GPU) -> float:
    """Return the time of one kernel, its launch included."""
    return max(arithmetic_seconds(cost, gpu), memory_seconds(cost, gpu)) + cost.kernels * KERNEL_SECONDS
