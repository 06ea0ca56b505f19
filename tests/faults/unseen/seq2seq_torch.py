"""An LSTM encoder-decoder with attention, which reverses padded sentences, in PyTorch."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

VOCAB, EMBED, HIDDEN, SOURCE, TARGET = 20, 10, 16, 6, 5
PAD, BOS = 0, 1


class LSTMCell(nn.Module):
    """An LSTM cell whose forget gate starts open."""

    def __init__(self, inputs, hidden):
        super().__init__()
        self.ih = nn.Linear(inputs, 4 * hidden)
        self.hh = nn.Linear(hidden, 4 * hidden, bias=False)

    def forward(self, x, state):
        h, c = state
        i, f, g, o = (self.ih(x) + self.hh(h)).chunk(4, dim=-1)
        forget = torch.sigmoid(f + 1.0)
        c = forget * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, c


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.src_embed = nn.Embedding(VOCAB, EMBED)
        self.tgt_embed = nn.Embedding(VOCAB, EMBED)
        self.encoder = LSTMCell(EMBED, HIDDEN)
        self.decoder = LSTMCell(EMBED, HIDDEN)
        self.score = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.combine = nn.Linear(2 * HIDDEN, EMBED)
        self.out = nn.Linear(EMBED, VOCAB)

    def encode(self, src):
        h = c = torch.zeros(len(src), HIDDEN, dtype=self.out.weight.dtype)
        outputs = []
        for t in range(src.shape[1]):
            new_h, new_c = self.encoder(self.src_embed(src[:, t]), (h, c))
            alive = (src[:, t] != PAD).unsqueeze(-1)
            h, c = torch.where(alive, new_h, h), torch.where(alive, new_c, c)
            outputs.append(new_h)
        return torch.stack(outputs, dim=1), (h, c)

    def forward(self, src, tgt_in):
        memory, state = self.encode(src)
        keys = self.score(memory)
        padding = src == PAD
        logits = []
        for t in range(tgt_in.shape[1]):
            state = self.decoder(self.tgt_embed(tgt_in[:, t]), state)
            h = state[0]
            energy = torch.einsum("bsh,bh->bs", keys, h)
            alpha = energy.masked_fill(padding, float("-inf")).softmax(dim=-1)
            context = (alpha.unsqueeze(-1) * memory).sum(dim=1)
            mixed = torch.tanh(self.combine(torch.cat([h, context], dim=-1)))
            logits.append(self.out(mixed))
        return torch.stack(logits, dim=1)


def torch_model():
    return Seq2Seq()


def torch_loss(model, batch):
    tgt = batch["tgt"]
    tgt_in = F.pad(tgt[:, :-1], (1, 0), value=BOS)
    logits = model(batch["src"], tgt_in)
    return F.cross_entropy(logits.transpose(1, 2), tgt, ignore_index=PAD)


def torch_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=5e-3)


def batch(step, rank):
    rng = np.random.default_rng((step, rank, 3))
    lengths = rng.integers(2, SOURCE, (4, 1))
    src = np.where(np.arange(SOURCE) < lengths, rng.integers(2, VOCAB, (4, SOURCE)), PAD)
    backwards = np.take_along_axis(src, (lengths - 1 - np.arange(TARGET)) % SOURCE, axis=1)
    tgt = np.where(np.arange(TARGET) < lengths, backwards, PAD)
    return {"src": src, "tgt": tgt}
