"""Prediction for a compiled step: its work, its time on one GPU, and how it scales."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from jaxddp.config.hardware import GPU, GPUS_PER_NODE, KERNEL_SECONDS
from jaxddp.plan import roofline
from jaxddp.plan.compiled import CompiledStep
from jaxddp.plan.costs import Cost
from jaxddp.plan.links import links_of
from jaxddp.plan.timeline import Timeline, play

COUNTS = tuple(2**exponent for exponent in range(11))  # GPUs in the table: 1 to 1,024


@dataclass(frozen=True)
class Bounds:
    """Seconds of a step's kernels, by what limits each.

    Attributes:
        arithmetic: kernels limited by floating-point operations.
        memory: kernels limited by memory traffic.
        launches: time from one kernel to the next.
    """

    arithmetic: float
    memory: float
    launches: float

    @property
    def largest(self) -> str:
        """Name of the largest."""
        return max(vars(self), key=lambda name: getattr(self, name))


@dataclass(frozen=True)
class Prediction:
    """Predicted times of a compiled step.

    Attributes:
        compiled: the step.
        gpu: kind of GPU.
        per_node, nodes: GPUs of the run that was asked for.
    """

    compiled: CompiledStep
    gpu: GPU
    per_node: int
    nodes: int = 1

    @property
    def count(self) -> int:
        """GPUs of the run."""
        return self.per_node * self.nodes

    @cached_property
    def cost(self) -> Cost:
        """Work of one step on one GPU."""
        return sum((event.cost for event in self.compiled.events), Cost())

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of the run that was asked for."""
        return self.at(self.count)

    def at(self, count: int, *, per_byte: float = 1.0, work_seconds: Callable[[Cost], float] | None = None) -> Timeline:
        """Return the timeline of a step on `count` GPUs, each with the same batch.

        Args:
            count: number of GPUs; nodes are filled one after another.
            per_byte: bytes sent for each byte that the program sends.
            work_seconds: time of a kernel; None: the roofline's.
        """
        links = links_of(self.gpu, count, GPUS_PER_NODE if self.nodes == 1 else self.per_node)
        work_seconds = work_seconds or partial(roofline.seconds, gpu=self.gpu)
        return play(self.compiled.events, work_seconds, lambda kind, size: links.seconds(kind, size * per_byte))

    @cached_property
    def scaling(self) -> dict[int, Timeline]:
        """Timeline by number of GPUs."""
        return {count: self.at(count) for count in COUNTS}

    @cached_property
    def bounds(self) -> Bounds:
        """Seconds of the kernels by what limits each."""
        arithmetic = memory = launches = 0.0
        for event in self.compiled.events:
            by_flops = roofline.arithmetic_seconds(event.cost, self.gpu)
            by_bytes = roofline.memory_seconds(event.cost, self.gpu)
            arithmetic += by_flops if by_flops > by_bytes else 0
            memory += by_bytes if by_bytes >= by_flops else 0
            launches += event.cost.kernels * KERNEL_SECONDS
        return Bounds(arithmetic, memory, launches)

    @property
    def utilisation(self) -> float:
        """Share of the peak that products and convolutions make of the step (MFU)."""
        products = self.cost.matrix + self.cost.convolution
        return products / self.gpu.flops_per_second(self.cost.dtype) / self.timeline.seconds
