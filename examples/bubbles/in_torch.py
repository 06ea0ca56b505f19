"""Step in torch, under DistributedDataParallel, with timestamps between its phases; needs no jax."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from examples.bubbles.cases import EPSILON, Case, Plan
from examples.bubbles.trace import ALL_REDUCE, BACKWARD, FORWARD, START
from torch_ref.config import TorchConfig
from torch_ref.distributed import World


@dataclass
class Clock:
    """A record of the phases that this rank has finished, and when."""

    marks: list[tuple[str, int]] = field(default_factory=list)

    def note(self, phase: str) -> None:
        """Record that a phase has just ended."""
        self.marks.append((phase, time.monotonic_ns()))

    def taken(self) -> list[tuple[str, int]]:
        """Return the marks since the last call."""
        marks, self.marks = self.marks, []
        return marks


class Total(torch.autograd.Function):
    """Differentiable sum over all ranks, with the time recorded before and after it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World, clock: Clock) -> Tensor:
        ctx.world, ctx.clock = world, clock
        clock.note(FORWARD)
        total = world.all_reduce(x.clone())
        clock.note(ALL_REDUCE)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.note(BACKWARD)
        total = ctx.world.all_reduce(gradient.clone())
        ctx.clock.note(ALL_REDUCE)
        return total, None, None


class Model(nn.Module):
    """Blocks that `examples.bubbles.cases` describes."""

    def __init__(self, plan: Plan, case: Case, world: World, clock: Clock):
        super().__init__()
        self.kernels = nn.ParameterList(map(torch.from_numpy, plan.kernels()))
        self.case, self.world, self.clock = case, world, clock

    def forward(self, x: Tensor) -> Tensor:
        rank = self.world.rank
        time.sleep(self.case.pause[rank])
        for _ in range(self.case.frozen[rank]):
            x = (x @ self.kernels[0].detach()).tanh()
        for kernel, passes in zip(self.kernels, self.case.passes[rank], strict=True):
            for _ in range(passes):
                x = (x @ kernel).tanh()
            x = self.normalised(x)
        return x

    def normalised(self, x: Tensor) -> Tensor:
        """Normalise each feature to mean 0 and variance 1, over this rank's examples or all ranks'."""
        sums, count = torch.stack([x.sum(0), x.square().sum(0)]), len(x)
        if self.case.sync_batch_norm:
            sums, count = Total.apply(sums, self.world, self.clock), count * self.world.world_size
        mean, square = sums / count
        return (x - mean) * (square - mean.square() + EPSILON).rsqrt()


class Step:
    """Training step of a case, on one rank.

    Args:
        plan: the sizes.
        case: what to run.
        world: the ranks that train together.
        count: the number of this rank's examples that count.

    Attributes:
        marks: each step's marks.
    """

    def __init__(self, plan: Plan, case: Case, world: World, count: Tensor):
        self.case, self.world = case, world
        self.clock = Clock()
        self.model = Model(plan, case, world, self.clock)
        self.ddp = DistributedDataParallel(self.model, process_group=world.group)
        self.ddp.register_comm_hook((world, self.clock, None if case.sync_loss else count), _mean)
        self.marks: list[list[tuple[str, int]]] = []

    def __call__(self, x: Tensor, y: Tensor, weights: Tensor) -> None:
        """Run the forward and the backward pass."""
        self.ddp.zero_grad()
        self.world.barrier()
        self.clock.note(START)
        h = self.ddp(x)
        self.clock.note(FORWARD)
        loss = (weights * (h - y).square().mean(1)).sum()
        if self.case.sync_loss:
            loss = loss / self.world.all_reduce(weights.sum())
            self.clock.note(ALL_REDUCE)
        loss.backward()
        self.marks.append(self.clock.taken())

    def gradient(self) -> Tensor:
        """Return the gradient of the last step, (blocks, D, D)."""
        return torch.stack([kernel.grad for kernel in self.model.kernels if kernel.grad is not None])


def measure(plan: Plan, world: World, config: TorchConfig) -> dict[str, dict[str, Any]]:
    """Run the cases in turn; return this rank's marks of each step of each case, and the case's gradient."""
    inputs = {name: torch.from_numpy(of_all[world.rank]) for name, of_all in plan.inputs().items()}
    steps = {name: Step(plan, case, world, inputs["weights"].sum()) for name, case in plan.cases.items()}
    for _ in range(1 + plan.steps):
        for step in steps.values():
            step(**inputs)
    return {name: {"steps": step.marks[1:], "gradient": step.gradient()} for name, step in steps.items()}


def _mean(state: tuple[World, Clock, Tensor | None], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum the gradients over the ranks; given a count, divide by the count of all ranks."""
    world, clock, count = state
    clock.note(BACKWARD)
    if count is None:
        result = world.all_reduce(bucket.buffer())
    else:
        both = world.all_reduce(torch.cat([bucket.buffer(), count[None]]))
        result = both[:-1] / both[-1]
    clock.note(ALL_REDUCE)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(result)
    return future
