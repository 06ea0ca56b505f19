"""Models and losses of the scenarios in torch, which the reference trains."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from . import policy, resnet

Batch = Mapping[str, Tensor]

LABEL_SMOOTHING = 0.1
AUXILIARY = 0.03  # weight of the auxiliary loss
PENALTY = 0.01  # weight of the squared parameters
DROPOUT = 0.25
PADDING, IGNORED = 0, -100
FEATURES, HIDDEN, CLASSES = 6, 8, 5  # of the mlp
HEIGHT, WIDTH, COLOURS = 6, 8, 2  # of the images
VOCABULARY, EMBEDDING, LENGTH = 12, 8, 7  # of the tokens


class Mlp(nn.Module):
    """Two hidden layers of one size; the batch brings a dropout mask for the first."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(FEATURES, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, HIDDEN)
        self.fc3 = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x)) * mask)))


class DropoutMlp(Mlp):
    """The same with dropout of the inputs, which draws its masks itself."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(self.drop(x), mask)


class ConvNet(nn.Module):
    """Convolution, BatchNorm, residual block, convolution with stride 2 and head, on images (B, H, W, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(COLOURS, 4, (3, 5), padding=(1, 2), bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, (3, 1), padding=(1, 0))
        self.conv3 = nn.Conv2d(4, 6, (3, 5), stride=2, padding=(1, 2))
        self.fc = nn.Linear(6 * HEIGHT // 2 * WIDTH // 2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.bn1(self.conv1(x.permute(0, 3, 1, 2))))
        x = x + F.gelu(self.conv2(x))
        return self.fc(F.gelu(self.conv3(x)).flatten(1))


class Tokens(nn.Module):
    """Embedding, a mean over the positions, a residual block, and the embedding again as the output layer.

    Args:
        unused: add a layer that the loss does not depend on.
    """

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, EMBEDDING, padding_idx=PADDING)
        self.norm1 = nn.LayerNorm(EMBEDDING)
        self.up = nn.Linear(EMBEDDING, 2 * EMBEDDING)
        self.down = nn.Linear(2 * EMBEDDING, EMBEDDING)
        self.norm2 = nn.LayerNorm(EMBEDDING)
        self.head = nn.Linear(EMBEDDING, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        if unused:
            self.unused = nn.Linear(EMBEDDING, EMBEDDING)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + x.mean(1, keepdim=True)
        x = x + self.down(F.gelu(self.up(self.norm1(x))))
        return self.head(self.norm2(x))


def mlp_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Compute the mean cross entropy."""
    return F.cross_entropy(model(batch["x"], batch["mask"]), batch["y"])


def mlp_penalty_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Add the squares of all parameters to the mean cross entropy."""
    return mlp_loss(model, batch) + PENALTY * sum(p.square().sum() for p in model.parameters())


def convnet_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Compute the mean cross entropy against smoothed labels."""
    return F.cross_entropy(model(batch["x"]), batch["y"], label_smoothing=LABEL_SMOOTHING)


def tokens_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Compute the mean cross entropy over the labels that count."""
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), ignore_index=IGNORED)


def tokens_global_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of every label, and 1 where the label counts."""
    labels = batch["y"].flatten()
    values = F.cross_entropy(model(batch["x"]).flatten(0, 1), labels, ignore_index=IGNORED, reduction="none")
    return values, (labels != IGNORED).to(values.dtype)


def tokens_sum_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Divide the sum over this micro-batch by the number of labels of the whole step; add an auxiliary loss.

    "items" is that number; "parts" is the number of replicas times micro-batches, over which a step averages.
    """
    logits = model(batch["x"])
    total = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), ignore_index=IGNORED, reduction="sum")
    return total / batch["items"][0] * batch["parts"][0] + AUXILIARY * logits.logsumexp(-1).square().mean()


MODELS: dict[str, Any] = {
    "mlp": (Mlp, mlp_loss),
    "mlp_dropout": (DropoutMlp, mlp_loss),
    "mlp_penalty": (Mlp, mlp_penalty_loss),
    "convnet": (ConvNet, convnet_loss),
    "tokens": (Tokens, tokens_loss),
    "tokens_global": (Tokens, tokens_global_loss),
    "tokens_sum": (Tokens, tokens_sum_loss),
    "policy": (policy.TorchPolicy, policy.torch_loss),
    "resnet": (resnet.TorchResNet, resnet.torch_loss),
}
