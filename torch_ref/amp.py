"""Mixed precision by torch's own autocast and GradScaler, from the configuration.

Source: pytorch.org/docs/stable/amp.html
"""

import torch
from torch import nn
from torch.amp import GradScaler

from jaxddp.config import TrainConfig
from torch_ref.losses import Batch, LossFunction, Sums

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(loss_fn: LossFunction, amp: str) -> LossFunction:
    """The loss with its forward pass in 16 bits, where autocast has them; "none": as it is."""
    if amp == "none":
        return loss_fn

    def in_16_bits(model: nn.Module, batch: Batch) -> Sums:
        with torch.autocast(next(model.parameters()).device.type, DTYPES[amp]):
            return loss_fn(model, batch)

    return in_16_bits


def grad_scaler(config: TrainConfig, device: torch.device) -> GradScaler:
    """Dynamic loss scaling with float16; one that does nothing otherwise.

    >>> grad_scaler(TrainConfig(amp="fp16"), torch.device("cpu")).get_scale()
    65536.0
    """
    return GradScaler(
        device.type,
        config.init_scale,
        config.growth_factor,
        config.backoff_factor,
        config.growth_interval,
        enabled=config.amp == "fp16",
    )
