"""DistributedDataParallel written from nothing, in JAX and in PyTorch, step by step.

    python -m examples.from_scratch

problem.py and loops.py know no framework: what is learned, and the loops that train it. skeleton.py is what
the two SimpleDDP have in common; in_jax.py and in_torch.py are what each framework adds to it. course.py goes
through the steps on either side, and claims.py says what has come of them.
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
