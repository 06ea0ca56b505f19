"""Mixed precision by torch's own autocast and GradScaler.

Source: pytorch.org/docs/stable/amp.html
"""

import torch
from torch import nn
from torch.amp import GradScaler

from jaxddp.config import TrainerConfig
from torch_ref.losses import Batch, LossFunction, Sums

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(loss_fn: LossFunction, amp: str) -> LossFunction:
    """Make a loss run its forward pass under torch.autocast.

    Args:
        loss_fn: the loss.
        amp: "none", "bf16" or "fp16"; "none" returns the loss unchanged.
    """
    if amp == "none":
        return loss_fn

    def in_16_bits(model: nn.Module, batch: Batch) -> Sums:
        with torch.autocast(next(model.parameters()).device.type, DTYPES[amp]):
            return loss_fn(model, batch)

    return in_16_bits


def grad_scaler(config: TrainerConfig, device: torch.device) -> GradScaler:
    """Return the scaler that `config` asks for; disabled without float16, since bfloat16 has float32's range.

    >>> grad_scaler(TrainerConfig(amp="fp16"), torch.device("cpu")).get_scale()
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
