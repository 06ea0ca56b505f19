"""A multilayer perceptron."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from torch_ref.dropout import dropout_layer


class MLP(nn.Module):
    """Linear layers with ReLU (and dropout) between them, for x (B, ...) flattened to (B, in_features).

    >>> [tuple(layer.weight.shape) for layer in MLP(2, (30, 20), 2).layers]
    [(30, 2), (20, 30), (2, 20)]
    """

    def __init__(
        self,
        in_features: int,
        hidden_sizes: Sequence[int],
        num_classes: int,
        dropout: float = 0.0,
        dropout_masks: str = "replica",
    ):
        super().__init__()
        sizes = [in_features, *hidden_sizes, num_classes]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.dropout = dropout_layer(dropout, dropout_masks)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = self.dropout(layer(x).relu())
        return self.layers[-1](x)
