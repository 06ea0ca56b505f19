"""Goes through the course on two replicas, in JAX and in PyTorch."""

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

MRPC = 3668  # sentence pairs to train on in the document


@dataclass(frozen=True)
class Options:
    """DDP from scratch: every step of it on two replicas, in JAX and in PyTorch."""

    platform: Literal["cpu", "gpu"] = "cpu"
    """Where the two replicas are."""


def main(options: Options) -> int:
    """Print what each step shows; return the number of claims that do not hold."""
    replicas = Replicas(prepare(2, options.platform))
    jax = in_jax.run(replicas)
    torch_places, torch, torch_times = in_torch.run(options.platform)
    show_places(in_jax.places(replicas), torch_places)
    show_training(jax, torch)
    show_shards()
    show_times(in_jax.times(replicas), torch_times)
    return report(claims.claims(jax, torch))


def show_places(jax: Sequence[Place], torch: Sequence[Place]) -> None:
    """Who is there."""
    print("1  Who is there                rank  local rank  world size")
    for side, places in (("JAX, one process for all", jax), ("torch, a process for each", torch)):
        for place in places:
            print(f"   {side:27}{place.rank:>5}{place.local_rank:>12}{place.world_size:>12}")


def show_training(jax: Measured, torch: Measured) -> None:
    """What the check says, what synchronisation does, and which loops are right."""
    print("\n2  Seeds 0 and 1 instead of one for all")
    print(f"   JAX    {jax.refusal}\n   torch  {torch.refusal}")
    print(f"\n3  Distance between the replicas after {STEPS} steps    JAX       torch")
    for says, name in (("each with its own gradients", "apart"), ("all with their mean", "together")):
        print(f"   {says:46}{getattr(jax, name):<10.3g}{getattr(torch, name):.3g}")
    print(f"\n4  Micro-batches of the optimizer steps, and those left over, of {STEPS}")
    print(f"   step on the last of each group     {_taken(jax.taken)}")
    print(f"   step on the first, as the document {_taken(jax.taken_on_first)}")


def show_shards() -> None:
    """How many steps each rank makes."""
    print("\n5  Steps of each rank in an epoch: batches of 8, incomplete ones dropped")
    for size, world_size in ((MRPC, 2), (MRPC, 3), (31, 2)):
        dealt = in_jax.sampler_steps(size, world_size, 8)
        pieces = contiguous_steps(size, world_size, 8)
        print(f"   {size:>5,} examples, {world_size} ranks    contiguous {pieces}    DistributedSampler {dealt}")


def show_times(jax: dict[str, float], torch: dict[str, float]) -> None:
    """What synchronisation costs."""
    print(f"\n6  Milliseconds per step, {TIMED_BATCH} examples per replica    JAX       torch")
    says = {"one": "one replica", "apart": "two, each for itself", "together": "two, synchronised"}
    for name, who in says.items():
        print(f"   {who:46}{jax[name]:<10.3g}{torch[name]:.3g}")
    print("   The document times the second: two replicas that train two models.\n")


def _taken(taken: Sequence[int]) -> str:
    *steps, left = taken
    return f"{' '.join(map(str, steps))}   left over {left}"


if __name__ == "__main__":
    with one_line_errors(show_traceback=False):
        sys.exit(1 if main(parse_plain(Options, sys.argv[1:], "python -m examples.from_scratch")) else 0)
