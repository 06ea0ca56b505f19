"""A first DDP script: a toy classifier on two replicas, in torch and in JAX, with the same output.

python -m examples.ddp_script
python -m examples.ddp_script.script_torch
python -m examples.ddp_script.script_jax
"""
