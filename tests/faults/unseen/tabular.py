"""Faults of the quantile regression in plain functions with a state."""

from .fault import UnseenFault

FAULTS = {
    "running_variance": UnseenFault(
        port="tabular",
        edits=(('"variance": variance * len(x) / (len(x) - 1)}', '"variance": variance}'),),
        ours="the running variance averages biased variances",
        reference="it averages unbiased variances, 8 / 7 times as large",
        expects=(
            r"varian|\bvar\b|running",
            r"biased|bessel|n ?- ?1|\b7\b|8 ?/ ?7|1\.142|0\.875|correction|ddof",
        ),
        jax_lines=(
            'seen = {"mean": mean, "variance": variance}',
            "return y, jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, running, seen)",
        ),
        torch_lines=("self.norm = nn.BatchNorm1d(WIDTH)", "z = self.norm(x)"),
    ),
    "first_column": UnseenFault(
        port="tabular",
        edits=(("table[categories[:, column]]", "table[categories[:, 0]]"),),
        ours="all tables are read at the first feature's category",
        reference="each table is read at its own feature's category",
        expects=(
            r"column|index|feature|embedding|categor|lookup|slice|select|gather|table",
            r"first|\b0\b|same|other|wrong|column|every|\ball\b|\b1\b|\b2\b",
        ),
        jax_lines=("features.append(table[categories[:, 0]])",),
        torch_lines=("x += [embedding(x_cat[:, i]) for i, embedding in enumerate(self.embeddings)]",),
    ),
    "bias_twice": UnseenFault(
        port="tabular",
        edits=(('x = x + linear(layer["outer"], z)', 'x = x + linear(layer["outer"], z) + layer["outer"]["b"]'),),
        ours="the bias of a residual layer is added twice",
        reference="it is added once",
        expects=(r"bias|\bb\b|offset", r"twice|doubl|two times|\b2(\.0)?\b|again|also|second time|added|extra"),
        jax_lines=('x = x + linear(layer["outer"], z) + layer["outer"]["b"]',),
        torch_lines=("return x + self.linear2(z)",),
    ),
    "decoupled_decay": UnseenFault(
        port="tabular",
        edits=(
            (
                "optax.chain(optax.add_decayed_weights(1e-2), optax.adam(1e-3))",
                "optax.adamw(1e-3, weight_decay=1e-2)",
            ),
        ),
        ours="weight decay acts on the weights, as in AdamW",
        reference="it is added to the gradient, before Adam's moments",
        expects=(r"decay|\bl2\b", r"coupl|adamw|gradient|\bl2\b|before|after|moment"),
        jax_lines=("jax_optimizer = optax.adamw(1e-3, weight_decay=1e-2)",),
        torch_lines=("return torch.optim.Adam(parameters, lr=1e-3, weight_decay=1e-2)",),
    ),
    "mean_of_levels": UnseenFault(
        port="tabular",
        edits=(("return costs.mean(axis=0).sum(), state", "return costs.mean(), state"),),
        ours="the loss is the mean over the three quantiles",
        reference="it is their sum",
        expects=(
            r"mean|averag|\bsum|mul|factor|scal|divi|times|weight",
            r"quantile|\bax[ei]s|\b3(\.0)?\b|0\.333|third|mean|\bdims?\b|level|output",
        ),
        jax_lines=("return costs.mean(), state",),
        torch_lines=("return loss.sum(dim=1).mean()",),
    ),
}
