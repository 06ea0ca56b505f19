"""A first DDP script: a toy classifier on two replicas, in torch and in JAX, with the same output.

python -m examples.ddp_script
python -m examples.ddp_script.script_torch
python -m examples.ddp_script.script_jax
"""

from examples.entry import Example

EXAMPLE = Example(
    name="The DDP script",
    seed="003",
    claim="A process per device, a DistributedSampler and set_epoch make a training script data-parallel.",
    verdict=(
        "True; in JAX one process is enough. But the sampler pads five rows to six, drop_last then trains on four, "
        "and accuracy over the training loader skips rows or counts one twice."
    ),
    command="python -m examples.ddp_script",
)
