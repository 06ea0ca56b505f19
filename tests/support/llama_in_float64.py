"""transformers' Llama in float64 throughout.

Unmodified, the model rounds to float32 in every norm and in the rotary angles, whatever the dtype of its weights.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForSequenceClassification
from transformers.models.llama.modeling_llama import LlamaRMSNorm


class Rotary(nn.Module):
    """Cosine and sine of the rotary angles, as transformers' LlamaRotaryEmbedding, but in float64."""

    def __init__(self, head_dim: int, theta: float):
        super().__init__()
        powers = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        self.frequencies = theta**-powers

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, each (1, T, head_dim), for positions (1, T)."""
        angles = position_ids[..., None] * self.frequencies.to(x.device)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


def in_float64(model: LlamaForSequenceClassification) -> LlamaForSequenceClassification:
    """Convert the model in place: parameters to float64, norms to torch's RMSNorm, which keeps float64."""
    config: Any = model.config
    model.double()
    model.model.rotary_emb = Rotary(config.head_dim, config.rope_parameters["rope_theta"])
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, LlamaRMSNorm):
                norm = nn.RMSNorm(child.weight.shape, child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model
