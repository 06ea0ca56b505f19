"""DistributedDataParallel written from scratch, in JAX and in PyTorch, step by step.

    python -m examples.from_scratch

problem.py (the task) and loops.py (the training loops) need no framework. skeleton.py holds what both SimpleDDP
classes share; in_jax.py and in_torch.py complete it. course.py runs the steps in either framework, and claims.py
checks the results.
"""

from examples.entry import Example

EXAMPLE = Example(
    name="DDP from scratch",
    seed="002",
    claim="A class that averages the gradients of identical replicas is data-parallel training.",
    verdict=(
        "True to the last digits, if the training loop divides by the number of micro-batches and steps on the "
        "last of each group."
    ),
    command="python -m examples.from_scratch",
)
