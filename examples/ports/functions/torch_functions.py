"""A word-level language model in PyTorch, after pytorch/examples/word_language_model (model.py)."""

import torch
from torch import nn
from torch.nn import functional as F

State = tuple[torch.Tensor, torch.Tensor]


class RNNModel(nn.Module):
    """An encoder, an LSTM and a decoder: words (T, B) to logarithms of probabilities (T B, ntoken) and the state."""

    def __init__(
        self, ntoken: int, ninp: int, nhid: int, nlayers: int, dropout: float = 0.5, tie_weights: bool = False
    ):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        if tie_weights:
            if nhid != ninp:
                raise ValueError("When using the tied flag, nhid must be equal to emsize")
            self.decoder.weight = self.encoder.weight
        self.init_weights()

    def init_weights(self) -> None:
        initrange = 0.1
        nn.init.uniform_(self.encoder.weight, -initrange, initrange)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -initrange, initrange)

    def forward(self, input: torch.Tensor, hidden: State | None = None) -> tuple[torch.Tensor, State]:
        emb = self.drop(self.encoder(input))
        output, hidden = self.rnn(emb, hidden)
        decoded = self.decoder(self.drop(output))
        return F.log_softmax(decoded.view(-1, decoded.size(-1)), dim=1), hidden
