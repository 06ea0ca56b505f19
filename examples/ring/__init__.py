"""Ring all-reduce, step by step: each replica's chunks, and the replicas whose numbers they contain.

    python -m examples.ring
    python -m examples.ring --replicas 3

JAX runs `jaxddp.distributed.ring_all_reduce`, torch `dist.batch_isend_irecv`. Every collective follows, before and
after.
"""

from examples.entry import Example

EXAMPLE = Example(
    name="Ring all-reduce",
    seed="001",
    claim="In a ring of N GPUs, N-1 steps of passing a chunk on and adding it leave the complete sum on every GPU.",
    verdict=(
        "Half true: after N-1 steps each GPU holds the complete sum of one chunk; N-1 more steps pass the chunks "
        "around."
    ),
    command="python -m examples.ring",
)
