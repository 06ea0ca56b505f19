"""DistributedDataParallel written from scratch, in JAX and in PyTorch, step by step.

    python -m examples.from_scratch

problem.py (the task) and loops.py (the training loops) need no framework. skeleton.py holds what both SimpleDDP
classes share; in_jax.py and in_torch.py complete it. course.py runs the steps in either framework, and claims.py
checks the results.
"""
