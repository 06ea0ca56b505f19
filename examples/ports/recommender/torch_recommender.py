"""DeepFM in PyTorch, with the names of rixwew/pytorch-fm: Guo et al. 2017, https://arxiv.org/abs/1703.04247.

All fields share one table; each field has its own range of rows.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn


class FeaturesEmbedding(nn.Module):
    """Indices (B, fields), counted within each field, to embeddings (B, fields, embed_dim)."""

    def __init__(self, field_dims: Sequence[int], embed_dim: int):
        super().__init__()
        self.embedding = nn.Embedding(sum(field_dims), embed_dim)
        self.offsets = np.array((0, *np.cumsum(field_dims)[:-1]), dtype=np.int64)
        nn.init.xavier_uniform_(self.embedding.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(x + x.new_tensor(self.offsets).unsqueeze(0))


class FeaturesLinear(nn.Module):
    """Indices (B, fields) to the sum of their weights, and a bias (B, 1)."""

    def __init__(self, field_dims: Sequence[int]):
        super().__init__()
        self.fc = nn.Embedding(sum(field_dims), 1)
        self.bias = nn.Parameter(torch.zeros((1,)))
        self.offsets = np.array((0, *np.cumsum(field_dims)[:-1]), dtype=np.int64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.new_tensor(self.offsets).unsqueeze(0)
        return torch.sum(self.fc(x), dim=1) + self.bias


class FactorizationMachine(nn.Module):
    """Embeddings (B, fields, embed_dim) to the sum of the inner products of all pairs (B, 1)."""

    def forward(self, x: Tensor) -> Tensor:
        square_of_sum = torch.sum(x, dim=1) ** 2
        sum_of_square = torch.sum(x**2, dim=1)
        return 0.5 * torch.sum(square_of_sum - sum_of_square, dim=1, keepdim=True)


class MultiLayerPerceptron(nn.Module):
    """Linear, BatchNorm, ReLU and dropout for each width, then one output."""

    def __init__(self, input_dim: int, embed_dims: Sequence[int], dropout: float):
        super().__init__()
        layers: list[nn.Module] = []
        for embed_dim in embed_dims:
            layers += [nn.Linear(input_dim, embed_dim), nn.BatchNorm1d(embed_dim), nn.ReLU(), nn.Dropout(p=dropout)]
            input_dim = embed_dim
        layers.append(nn.Linear(input_dim, 1))
        self.mlp = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class DeepFactorizationMachineModel(nn.Module):
    """Indices (B, fields) to the probability of a click (B,)."""

    def __init__(self, field_dims: Sequence[int], embed_dim: int, mlp_dims: Sequence[int], dropout: float):
        super().__init__()
        self.linear = FeaturesLinear(field_dims)
        self.fm = FactorizationMachine()
        self.embedding = FeaturesEmbedding(field_dims, embed_dim)
        self.embed_output_dim = len(field_dims) * embed_dim
        self.mlp = MultiLayerPerceptron(self.embed_output_dim, mlp_dims, dropout)

    def forward(self, x: Tensor) -> Tensor:
        embed_x = self.embedding(x)
        x = self.linear(x) + self.fm(embed_x) + self.mlp(embed_x.view(-1, self.embed_output_dim))
        return torch.sigmoid(x.squeeze(1))
