"""MLP-Mixer in PyTorch (arXiv:2105.01601), after timm (github.com/huggingface/pytorch-image-models, mlp_mixer.py)."""

from functools import partial

import torch
from torch import nn


class PatchEmbed(nn.Module):
    def __init__(self, patch_size: int, embed_dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)  # (B, C, H, W) to (B, H W, C)


class Mlp(nn.Module):
    def __init__(self, in_features: int, hidden_features: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_features, in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


class MixerBlock(nn.Module):
    def __init__(self, dim: int, seq_len: int, tokens_dim: int, channels_dim: int) -> None:
        super().__init__()
        norm_layer = partial(nn.LayerNorm, eps=1e-6)
        self.norm1 = norm_layer(dim)
        self.mlp_tokens = Mlp(seq_len, tokens_dim)
        self.norm2 = norm_layer(dim)
        self.mlp_channels = Mlp(dim, channels_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp_channels(self.norm2(x))


class MlpMixer(nn.Module):
    """Images (B, 3, H, W) to logits (B, num_classes). The sizes are those of Mixer-S."""

    def __init__(
        self,
        num_classes: int = 1000,
        img_size: int = 224,
        patch_size: int = 16,
        num_blocks: int = 8,
        embed_dim: int = 512,
        mlp_ratio: tuple[float, float] = (0.5, 4.0),
    ) -> None:
        super().__init__()
        tokens_dim, channels_dim = (int(ratio * embed_dim) for ratio in mlp_ratio)
        self.stem = PatchEmbed(patch_size, embed_dim)
        seq_len = (img_size // patch_size) ** 2
        self.blocks = nn.Sequential(
            *(MixerBlock(embed_dim, seq_len, tokens_dim, channels_dim) for _ in range(num_blocks))
        )
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head = nn.Linear(embed_dim, num_classes)
        self.apply(_init_weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.stem(x))).mean(dim=1))


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)


def param_groups_weight_decay(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Split the parameters into those that decay, and biases and norms, which do not."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    no_decay = {name for name, p in named if p.ndim <= 1 or name.endswith(".bias")}
    return [
        {"params": [p for name, p in named if name in no_decay], "weight_decay": 0.0},
        {"params": [p for name, p in named if name not in no_decay], "weight_decay": weight_decay},
    ]
