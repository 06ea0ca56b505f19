"""Communication hooks under the names of torch's DDP communication hooks."""

from jaxddp.comm_hooks.hooks import (
    CommHook,
    batched_powerSGD,
    bf16_compress,
    fp16_compress,
    from_config,
    powerSGD,
    stateless,
)

__all__ = ["CommHook", "batched_powerSGD", "bf16_compress", "fp16_compress", "from_config", "powerSGD", "stateless"]
