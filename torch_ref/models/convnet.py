"""A small residual convolutional network."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.dropout import dropout_layer


class Block(nn.Module):
    """Residual block relu(x + bn2(conv2(relu(bn1(conv1(x)))))), on (B, C, H, W)."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x)).relu()
        return (x + self.bn2(self.conv2(y))).relu()


class Stage(nn.Module):
    """A 3x3 convolution, BatchNorm, ReLU, and a residual block."""

    def __init__(self, in_channels: int, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.block = Block(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.bn(self.conv(x)).relu())


class ConvNet(nn.Module):
    """Stages with 2x2 max-pooling between them, the mean over the image, (dropout,) and a linear layer.

    For x (B, H, W) or (B, H, W, in_channels).

    Args:
        channels: number of channels of each stage.
    """

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int],
        num_classes: int,
        dropout: float = 0.0,
        dropout_masks: str = "replica",
    ):
        super().__init__()
        before = [in_channels, *channels[:-1]]
        self.stages = nn.ModuleList(Stage(a, b) for a, b in zip(before, channels, strict=True))
        self.dropout = dropout_layer(dropout, dropout_masks)
        self.fc = nn.Linear(channels[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(*x.shape[:3], -1).permute(0, 3, 1, 2)
        for number, stage in enumerate(self.stages):
            x = stage(F.max_pool2d(x, 2) if number else x)
        return self.fc(self.dropout(x.mean(dim=(2, 3))))
