"""Run the course on two replicas, in JAX and in PyTorch."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from examples.claims import report
from examples.from_scratch import claims, in_jax, in_torch
from examples.from_scratch.course import Measured
from examples.from_scratch.problem import STEPS, TIMED_BATCH, contiguous_steps
from examples.from_scratch.skeleton import Place
from jaxddp import Replicas, prepare
from jaxddp.cli import one_line_errors, parse_plain

MRPC = 3668  # sentence pairs in MRPC's training set


@dataclass(frozen=True)
class Options:
    """Build DDP from scratch, step by step, on two replicas in JAX and in PyTorch."""

    platform: Literal["cpu", "gpu"] = "cpu"
    """Platform of the two replicas."""


def main(options: Options) -> int:
    """Print every step; return the number of claims that do not hold."""
    replicas = Replicas(prepare(2, options.platform))
    jax = in_jax.run(replicas)
    torch_places, torch, torch_times = in_torch.run(options.platform)
    show_places(in_jax.places(replicas), torch_places)
    show_training(jax, torch)
    show_shards()
    show_times(in_jax.times(replicas), torch_times)
    return report(claims.claims(jax, torch))


def show_places(jax: Sequence[Place], torch: Sequence[Place]) -> None:
    """Print the rank, local rank and world size of every replica."""
    print("1  Replicas                    rank  local rank  world size")
    for side, places in (("JAX, one process", jax), ("torch, a process per rank", torch)):
        for place in places:
            print(f"   {side:27}{place.rank:>5}{place.local_rank:>12}{place.world_size:>12}")


def show_training(jax: Measured, torch: Measured) -> None:
    """Print the check's error, the effect of synchronisation, and the steps of right and wrong loops."""
    print("\n2  Seeds 0 and 1 instead of one seed for all replicas")
    print(f"   JAX    {jax.refusal}\n   torch  {torch.refusal}")
    print(f"\n3  Distance between the replicas after {STEPS} steps    JAX       torch")
    for says, name in (("each steps with its own gradients", "apart"), ("all step with the mean", "together")):
        print(f"   {says:46}{getattr(jax, name):<10.3g}{getattr(torch, name):.3g}")
    print(f"\n4  Micro-batches per optimizer step, and those left over, of {STEPS}")
    print(f"   step on the last of each group               {_taken(jax.taken)}")
    print(f"   step on the first of each group              {_taken(jax.taken_on_first)}")


def show_shards() -> None:
    """Print the number of steps of each rank."""
    print("\n5  Steps of each rank in an epoch: batches of 8, incomplete ones dropped")
    for size, world_size in ((MRPC, 2), (MRPC, 3), (31, 2)):
        dealt = in_jax.sampler_steps(size, world_size, 8)
        pieces = contiguous_steps(size, world_size, 8)
        print(f"   {size:>5,} examples, {world_size} ranks    contiguous {pieces}    DistributedSampler {dealt}")


def show_times(jax: dict[str, float], torch: dict[str, float]) -> None:
    """Print the duration of a step with and without synchronisation."""
    print(f"\n6  Milliseconds per step, {TIMED_BATCH} examples per replica    JAX       torch")
    says = {"one": "one replica", "apart": "two, not synchronised", "together": "two, synchronised"}
    for name, label in says.items():
        print(f"   {label:46}{jax[name]:<10.3g}{torch[name]:.3g}")
    print("   The second line is no data-parallel training: two replicas train two models.\n")


def _taken(taken: Sequence[int]) -> str:
    *steps, left = taken
    return f"{' '.join(map(str, steps))}   left over {left}"


if __name__ == "__main__":
    with one_line_errors(show_traceback=False):
        sys.exit(1 if main(parse_plain(Options, sys.argv[1:], "python -m examples.from_scratch")) else 0)
