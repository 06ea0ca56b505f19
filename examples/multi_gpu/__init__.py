"""Scaling from one device of this machine to all of them, in JAX and in PyTorch.

    python -m examples.multi_gpu
    torchrun --standalone --nproc-per-node=gpu -m examples.multi_gpu --framework torch
    sbatch examples/multi_gpu/jax.sbatch
    sbatch examples/multi_gpu/torch.sbatch

Without GPUs the example runs on CPU devices, which share the machine's cores. Little scales then, and JAX's single
replica uses all cores where torch's uses one.
"""
