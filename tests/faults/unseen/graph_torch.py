"""A graph attention network that regresses a property of small graphs, in PyTorch."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

GRAPHS, NODES, EDGES, NODE_DIM, EDGE_DIM, DIM, LAYERS = 5, 6, 11, 7, 3, 20, 2


class GATLayer(nn.Module):
    """Attention of each node over the edges that end in it."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(DIM, DIM, bias=False)
        self.edge = nn.Linear(EDGE_DIM, DIM)
        self.att_src = nn.Parameter(torch.randn(DIM) * 0.5)
        self.att_dst = nn.Parameter(torch.randn(DIM) * 0.5)
        self.update = nn.Linear(DIM, DIM)

    def forward(self, x, edge_index, edge_attr):
        src, dst = edge_index
        h = self.lin(x)
        alpha = F.leaky_relu(h[src] @ self.att_src + h[dst] @ self.att_dst, negative_slope=0.2)
        alpha = torch.exp(alpha)
        total = torch.zeros(len(x), dtype=x.dtype).index_add(0, dst, alpha)
        alpha = alpha / (total[dst] + 1e-6)
        message = alpha.unsqueeze(-1) * (h[src] + self.edge(edge_attr))
        out = torch.zeros_like(h).index_add(0, dst, message)
        return x + F.elu(self.update(out))


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.node_encoder = nn.Linear(NODE_DIM, DIM)
        self.convs = nn.ModuleList(GATLayer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.readout = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, 1))

    def forward(self, x, edge_index, edge_attr, graph_id, num_graphs):
        x = self.node_encoder(x)
        for conv in self.convs:
            x = conv(x, edge_index, edge_attr)
        x = self.norm(x)
        sums = torch.zeros(num_graphs, DIM, dtype=x.dtype).index_add(0, graph_id, x)
        pooled = sums / torch.bincount(graph_id, minlength=num_graphs).unsqueeze(-1)
        return self.readout(pooled).squeeze(-1)


def torch_model():
    return GraphNet()


def torch_loss(model, batch):
    """Make one large graph of the batch, without the edges that only pad."""
    b, n, _ = batch["nodes"].shape
    real = batch["real"].bool().flatten()
    offset = n * torch.arange(b)[:, None]
    edge_index = torch.stack([(batch[end] + offset).flatten()[real] for end in ("senders", "receivers")])
    edge_attr = batch["edges"].flatten(0, 1)[real]
    graph_id = torch.arange(b).repeat_interleave(n)
    prediction = model(batch["nodes"].flatten(0, 1), edge_index, edge_attr, graph_id, b)
    return F.smooth_l1_loss(prediction, batch["target"], beta=0.5)


def torch_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=3e-3)


def batch(step, rank):
    rng = np.random.default_rng((step, rank, 8))
    nodes = rng.normal(0, 1, (GRAPHS, NODES, NODE_DIM))
    return {
        "nodes": nodes,
        "edges": rng.normal(0, 1, (GRAPHS, EDGES, EDGE_DIM)),
        "senders": rng.integers(0, NODES, (GRAPHS, EDGES)),
        "receivers": rng.integers(0, NODES, (GRAPHS, EDGES)),
        "real": (np.arange(EDGES) < rng.integers(6, EDGES, (GRAPHS, 1))).astype(np.int64),
        "target": np.sin(nodes.sum((1, 2))) + rng.normal(0, 0.5, GRAPHS),
    }
