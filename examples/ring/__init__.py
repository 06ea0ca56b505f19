"""Ring all-reduce, step by step: who has whose part of which chunk, and how much of the sum.

    python -m examples.ring
    python -m examples.ring --replicas 3

In JAX by `jaxddp.distributed.ring_all_reduce`, in torch by `dist.batch_isend_irecv`; below it each collective,
before and after.
"""

from examples.entry import Example

EXAMPLE = Example(
    name="Ring all-reduce",
    seed="001",
    claim="In a ring of N GPUs, N-1 steps of sending a chunk on and adding it up leave everybody with the whole sum.",
    verdict="Half of it: after N-1 steps each has the sum of one chunk only, and N-1 more steps hand the chunks round.",
    command="python -m examples.ring",
)
