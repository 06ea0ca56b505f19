"""Ring all-reduce, step by step: each replica's chunks, and the replicas whose numbers they contain.

    python -m examples.ring
    python -m examples.ring --devices 3

JAX runs `jaxddp.distributed.ring_all_reduce`, torch `dist.batch_isend_irecv`. Every collective follows, before and
after.
"""
