"""A linear classifier."""

from torch import Tensor, nn


class Linear(nn.Module):
    """Linear classifier x W^T + b, for x (B, ...) flattened to (B, in_features)."""

    def __init__(self, in_features: int, num_classes: int):
        super().__init__()
        self.fc = nn.Linear(in_features, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1))
