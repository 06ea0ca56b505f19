"""A character model that predicts the next letter from the last few."""

from torch import Tensor, nn

from torch_ref.dropout import dropout_layer


class CharMLP(nn.Module):
    """Embedding, linear, BatchNorm, tanh, (dropout,) linear, for x (B, context_length) integer.

    Source: Bengio et al., A Neural Probabilistic Language Model, 2003, with BatchNorm.
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        embedding_size: int,
        hidden_size: int,
        dropout: float = 0.0,
        dropout_masks: str = "replica",
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embedding_size)
        self.fc1 = nn.Linear(context_length * embedding_size, hidden_size)
        self.bn = nn.BatchNorm1d(hidden_size)
        self.dropout = dropout_layer(dropout, dropout_masks)
        self.fc2 = nn.Linear(hidden_size, vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x).flatten(1)
        return self.fc2(self.dropout(self.bn(self.fc1(x)).tanh()))
