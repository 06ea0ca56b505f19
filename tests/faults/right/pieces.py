"""Functions that both halves of a port call, each in several ways to write it that mean the same."""

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import dedent, indent


@dataclass(frozen=True)
class Piece:
    """A function that means the same in both halves.

    Attributes:
        signature: name and parameters.
        torch, jax: name of a style -> expression to return, or statements.
    """

    signature: str
    torch: Mapping[str, str]
    jax: Mapping[str, str]

    def written(self, half: str, style: str) -> str:
        """Return the function's definition.

        >>> Piece("act(x)", {"clamp": "x.clamp(min=0)"}, {}).written("torch", "clamp")
        'def act(x):\\n    return x.clamp(min=0)\\n'
        """
        text = dedent(getattr(self, half)[style]).strip()
        return f"def {self.signature}:\n{indent(text if chr(10) in text else f'return {text}', ' ' * 4)}\n"


def _activation(torch: Mapping[str, str], jax: Mapping[str, str]) -> Piece:
    return Piece("act(x)", torch, jax)


ACTIVATIONS = {
    "gelu": _activation(
        {"layer": "nn.GELU()(x)", "function": "F.gelu(x)", "erf": "0.5 * x * (1 + torch.erf(x / math.sqrt(2)))"},
        {
            "function": "jax.nn.gelu(x, approximate=False)",
            "erf": "0.5 * x * (1 + lax.erf(x / np.sqrt(2)))",
            "cdf": "x * jax.scipy.stats.norm.cdf(x)",
        },
    ),
    "silu": _activation(
        {"layer": "nn.SiLU()(x)", "function": "F.silu(x)", "factor": "x * torch.sigmoid(x)"},
        {"function": "jax.nn.silu(x)", "factor": "x * jax.nn.sigmoid(x)", "tanh": "0.5 * x * (1 + jnp.tanh(0.5 * x))"},
    ),
    "softplus": _activation(
        {"logaddexp": "torch.logaddexp(x, torch.zeros_like(x))", "logsigmoid": "-F.logsigmoid(-x)"},
        {
            "function": "jax.nn.softplus(x)",
            "log1p": "jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))",
            "log_sigmoid": "-jax.nn.log_sigmoid(-x)",
        },
    ),
    "softplus20": _activation(  # torch's function is the identity above 20
        {"layer": "nn.Softplus()(x)", "function": "F.softplus(x)"},
        {
            "where": "jnp.where(x > 20, x, jax.nn.softplus(x))",
            "log1p": "jnp.where(x > 20, x, jnp.log1p(jnp.exp(jnp.minimum(x, 20.0))))",
        },
    ),
    "hardswish": _activation(
        {"layer": "nn.Hardswish()(x)", "function": "F.hardswish(x)", "clamp": "x * (x + 3).clamp(0, 6) / 6"},
        {
            "function": "jax.nn.hard_swish(x)",
            "clip": "x * jnp.clip(x + 3, 0, 6) / 6",
            "where": "jnp.where(x <= -3, 0.0, jnp.where(x >= 3, x, x * (x + 3) / 6))",
        },
    ),
    "leaky": _activation(
        {
            "layer": "nn.LeakyReLU(0.1)(x)",
            "function": "F.leaky_relu(x, 0.1)",
            "where": "torch.where(x > 0, x, 0.1 * x)",
            "maximum": "torch.maximum(x, 0.1 * x)",
        },
        {
            "function": "jax.nn.leaky_relu(x, 0.1)",
            "where": "jnp.where(x >= 0, x, 0.1 * x)",
            "maximum": "jnp.maximum(x, 0.1 * x)",
        },
    ),
    "elu": _activation(
        {"function": "F.elu(x)", "where": "torch.where(x > 0, x, torch.expm1(x.clamp(max=0)))"},
        {"function": "jax.nn.elu(x)", "where": "jnp.where(x > 0, x, jnp.expm1(jnp.minimum(x, 0)))"},
    ),
    "tanh": _activation(
        {"layer": "nn.Tanh()(x)", "method": "x.tanh()", "sigmoid": "2 * torch.sigmoid(2 * x) - 1"},
        {"function": "jnp.tanh(x)", "sigmoid": "2 * jax.nn.sigmoid(2 * x) - 1"},
    ),
    "relu": _activation(
        {"layer": "nn.ReLU()(x)", "function": "F.relu(x)", "clamp": "x.clamp(min=0)"},
        {"function": "jax.nn.relu(x)", "maximum": "jnp.maximum(x, 0)", "where": "jnp.where(x > 0, x, 0.0)"},
    ),
}

PIECES = {
    # Masks (B or 1, 1, T or 1, T) are true where a query may see a key; queries, keys and values are (B, T, H, D).
    "attend": Piece(
        "attend(q, k, v, mask)",
        {
            "sdpa": """
                q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)""",
            "einsum": """
                scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
                return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~mask, -torch.inf).softmax(dim=-1), v)""",
            "additive": """
                bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -torch.inf)
                scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * q.shape[-1] ** -0.5 + bias
                return (F.softmax(scores, dim=-1) @ v.transpose(1, 2)).transpose(1, 2)""",
            "factor": """
                seen = mask.to(q.dtype)
                scores = torch.matmul(q.transpose(1, 2) / math.sqrt(q.shape[-1]), k.permute(0, 2, 3, 1))
                weights = F.softmax(scores * seen - 1e9 * (1 - seen), dim=-1)
                return torch.matmul(weights, v.transpose(1, 2)).transpose(1, 2)""",
        },
        {
            "library": "jax.nn.dot_product_attention(q, k, v, mask=mask)",
            "where": """
                scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
                return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), v)""",
            "stable": """
                scores = jnp.where(mask, jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5, -jnp.inf)
                powers = jnp.exp(scores - lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
                return jnp.einsum("bhqk,bkhd->bqhd", powers / powers.sum(axis=-1, keepdims=True), v)""",
            "heads": """
                def head(q, k, v):
                    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
                    return jax.nn.softmax(scores, axis=-1, where=mask[:, 0]) @ v

                return jax.vmap(head, in_axes=2, out_axes=2)(q, k, v)""",
            "factor": """
                seen = mask.astype(q.dtype)
                scores = jnp.matmul(q.swapaxes(1, 2), k.transpose(0, 2, 3, 1)) / np.sqrt(q.shape[-1])
                weights = jax.nn.softmax(scores * seen - 1e9 * (1 - seen), axis=-1)
                return jnp.matmul(weights, v.swapaxes(1, 2)).swapaxes(1, 2)""",
            "additive": """
                scores = jnp.einsum("bqhd,bkhd->bqkh", q, k) / np.sqrt(q.shape[-1])
                bias = jnp.where(mask, 0.0, -jnp.inf).transpose(0, 2, 3, 1)
                return jnp.einsum("bqkh,bkhd->bqhd", jax.nn.softmax(scores + bias, axis=2), v)""",
        },
    ),
    "causal": Piece(
        "causal(length)",
        {
            "tril": "torch.ones(1, 1, length, length, dtype=torch.bool).tril()",
            "compared": "(torch.arange(length)[:, None] >= torch.arange(length))[None, None]",
        },
        {
            "tril": "jnp.tril(jnp.ones((1, 1, length, length), bool))",
            "compared": "(jnp.arange(length)[:, None] >= jnp.arange(length)[None])[None, None]",
            "numpy": "jnp.asarray(np.tri(length, dtype=bool)[None, None])",
        },
    ),
    "normed": Piece(
        "normed(x, scale, offset)",
        {
            "function": "F.layer_norm(x, x.shape[-1:], scale, offset)",
            "formula": """
                mean, var = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
                return (x - mean) * torch.rsqrt(var + 1e-5) * scale + offset""",
            "centred": """
                x = x - x.mean(dim=-1, keepdim=True)
                return scale * x / torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + 1e-5) + offset""",
        },
        {
            "var": """
                mean, var = x.mean(axis=-1, keepdims=True), jnp.var(x, axis=-1, keepdims=True)
                return (x - mean) * lax.rsqrt(var + 1e-5) * scale + offset""",
            "centred": """
                x = x - jnp.mean(x, axis=-1, keepdims=True)
                return scale * x / jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5) + offset""",
            "standardize": "jax.nn.standardize(x, variance=x.var(-1, keepdims=True), epsilon=1e-5) * scale + offset",
        },
    ),
    "root": Piece(
        "root(x, scale)",
        {
            "function": "F.rms_norm(x, x.shape[-1:], scale, 1e-6)",
            "formula": "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale",
        },
        {
            "formula": "x * lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-6) * scale",
            "einsum": """
                squares = jnp.einsum("...i,...i->...", x, x)[..., None]
                return scale * x / jnp.sqrt(squares / x.shape[-1] + 1e-6)""",
        },
    ),
    "cross_entropy": Piece(
        "cross_entropy(logits, labels)",
        {
            "function": "F.cross_entropy(logits, labels)",
            "nll": "F.nll_loss(logits.log_softmax(dim=-1), labels)",
            "gather": "-logits.log_softmax(dim=-1).gather(-1, labels[..., None]).mean()",
            "product": "-(F.one_hot(labels, logits.shape[-1]) * F.log_softmax(logits, dim=-1)).sum(dim=-1).mean()",
        },
        {
            "optax": "optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()",
            "product": "-(jax.nn.one_hot(labels, logits.shape[-1]) * jax.nn.log_softmax(logits)).sum(axis=-1).mean()",
            "logsumexp": """
                chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
                return jnp.mean(jax.scipy.special.logsumexp(logits, axis=-1) - chosen)""",
            "vmap": "-jax.vmap(lambda row, label: jax.nn.log_softmax(row)[label])(logits, labels).mean()",
        },
    ),
    "smoothed": Piece(
        "smoothed(logits, labels)",
        {
            "function": "F.cross_entropy(logits, labels, label_smoothing=0.1)",
            "formula": """
                logs = logits.log_softmax(dim=-1)
                return (-0.9 * logs.gather(-1, labels[:, None])[:, 0] - 0.1 * logs.mean(dim=-1)).mean()""",
        },
        {
            "optax": """
                targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), 0.1)
                return optax.softmax_cross_entropy(logits, targets).mean()""",
            "formula": """
                logs = jax.nn.log_softmax(logits)
                targets = jnp.where(jnp.arange(logits.shape[-1]) == labels[:, None], 0.9, 0.0) + 0.1 / logits.shape[-1]
                return -jnp.einsum("bc,bc->b", targets, logs).mean()""",
        },
    ),
    "ignoring": Piece(  # labels (B, T) are -100 where they do not count
        "ignoring(logits, labels)",
        {
            "index": "F.cross_entropy(logits.flatten(0, 1), labels.flatten())",
            "transposed": "F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100)",
            "factor": """
                losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten().clamp(min=0), reduction="none")
                return (losses * (labels.flatten() >= 0)).sum() / (labels >= 0).sum()""",
            "chosen": "F.cross_entropy(logits[labels != -100], labels[labels != -100])",
        },
        {
            "factor": """
                valid = (labels != -100).astype(logits.dtype)
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
                return (losses * valid).sum() / valid.sum()""",
            "where": """
                valid = labels >= 0
                logs = jax.nn.log_softmax(logits)
                picked = jnp.take_along_axis(logs, jnp.where(valid, labels, 0)[..., None], axis=-1)[..., 0]
                return -jnp.where(valid, picked, 0).sum() / jnp.sum(valid)""",
            "mean": """
                losses = optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1]))
                return losses.mean(where=labels != -100)""",
        },
    ),
    "binary": Piece(  # one loss per element
        "binary(logits, targets)",
        {
            "function": 'F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="none")',
            "softplus": "torch.logaddexp(logits, torch.zeros_like(logits)) - logits * targets",
        },
        {
            "optax": "optax.sigmoid_binary_cross_entropy(logits, targets)",
            "softplus": "jax.nn.softplus(logits) - targets * logits",
            "log1p": "jnp.maximum(logits, 0) - logits * targets + jnp.log1p(jnp.exp(-jnp.abs(logits)))",
        },
    ),
    "squared": Piece(
        "squared(x, y)",
        {"function": "F.mse_loss(x, y)", "power": "((x - y) ** 2).mean()", "layer": "nn.MSELoss()(x, y)"},
        {
            "optax": "optax.squared_error(x, y).mean()",
            "halves": "2 * optax.l2_loss(x, y).mean()",
            "vdot": "jnp.vdot(x - y, x - y) / x.size",
        },
    ),
    "huber": Piece(  # one loss per element
        "huber(x, y)",
        {
            "function": 'F.huber_loss(x, y, delta=0.5, reduction="none")',
            "smooth": '0.5 * F.smooth_l1_loss(x, y, beta=0.5, reduction="none")',
            "where": """
                far = (x - y).abs()
                return torch.where(far < 0.5, 0.5 * far**2, 0.5 * (far - 0.25))""",
        },
        {
            "optax": "optax.huber_loss(x, y, delta=0.5)",
            "where": """
                far = jnp.abs(x - y)
                return jnp.where(far < 0.5, 0.5 * jnp.square(x - y), 0.5 * far - 0.125)""",
            "minimum": """
                near = jnp.minimum(jnp.abs(x - y), 0.5)
                return near * (jnp.abs(x - y) - 0.5 * near)""",
        },
    ),
    "divergence": Piece(  # of each example, of softmax(logits) from softmax(targets)
        "divergence(logits, targets)",
        {
            "function": 'F.kl_div(logits.log_softmax(-1), targets.softmax(-1), reduction="none").sum(dim=-1)',
            "log_target": 'F.kl_div(logits.log_softmax(-1), targets.log_softmax(-1), reduction="none", '
            "log_target=True).sum(dim=-1)",
            "formula": "(targets.softmax(-1) * (targets.log_softmax(-1) - logits.log_softmax(-1))).sum(dim=-1)",
        },
        {
            "optax": "optax.losses.kl_divergence_with_log_targets("
            "jax.nn.log_softmax(logits), jax.nn.log_softmax(targets))",
            "formula": "jnp.sum(jax.nn.softmax(targets) * "
            "(jax.nn.log_softmax(targets) - jax.nn.log_softmax(logits)), axis=-1)",
        },
    ),
    "pooled": Piece(  # mean of x (B, T, C) over the valid positions
        "pooled(x, valid)",
        {
            "factor": "(x * valid[..., None]).sum(dim=1) / valid.sum(dim=1, keepdim=True)",
            "where": "torch.where(valid[..., None], x, 0.0).sum(dim=1) / valid.sum(dim=1)[:, None]",
            "einsum": 'torch.einsum("btc,bt->bc", x, valid / valid.sum(dim=1, keepdim=True))',
            "rows": "torch.stack([row[seen].mean(dim=0) for row, seen in zip(x, valid)])",
        },
        {
            "mean": "jnp.mean(x, axis=1, where=valid[..., None])",
            "where": "jnp.where(valid[..., None], x, 0).sum(axis=1) / valid.sum(axis=1, keepdims=True)",
            "einsum": 'jnp.einsum("btc,bt->bc", x, valid.astype(x.dtype)) / valid.sum(axis=1)[:, None]',
            "vmap": "jax.vmap(lambda row, seen: seen.astype(row.dtype) @ row / seen.sum())(x, valid)",
        },
    ),
    "last": Piece(  # x (B, T, C) at the last position of each sequence
        "last(x, lengths)",
        {
            "index": "x[torch.arange(len(x)), lengths - 1]",
            "gather": "x.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, x.shape[-1]))[:, 0]",
            "select": "torch.stack([row[n - 1] for row, n in zip(x, lengths)])",
        },
        {
            "index": "x[jnp.arange(len(x)), lengths - 1]",
            "take": "jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]",
            "one_hot": 'jnp.einsum("btc,bt->bc", x, jax.nn.one_hot(lengths - 1, x.shape[1], dtype=x.dtype))',
            "slice": "jax.vmap(lambda row, n: lax.dynamic_index_in_dim(row, n - 1, keepdims=False))(x, lengths)",
        },
    ),
    "unit": Piece(
        "unit(x)",
        {"function": "F.normalize(x, dim=-1)", "norm": "x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12)"},
        {
            "norm": "x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)",
            "rsqrt": "x * lax.rsqrt(jnp.maximum(jnp.square(x).sum(axis=-1, keepdims=True), 1e-24))",
        },
    ),
    "discounted": Piece(  # y_t = 0.8 y_(t - 1) + x_t along the second axis
        "discounted(x)",
        {
            "loop": """
                y = [x[:, 0]]
                for t in range(1, x.shape[1]):
                    y.append(0.8 * y[-1] + x[:, t])
                return torch.stack(y, dim=1)""",
            "product": """
                ages = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
                powers = torch.where(ages >= 0, 0.8 ** ages.clamp(min=0), 0).to(x.dtype)
                return torch.einsum("ts,bsc->btc", powers, x)""",
        },
        {
            "scan": """
                step = lambda y, x_t: (0.8 * y + x_t,) * 2
                return lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1].swapaxes(0, 1)""",
            "associative": """
                join = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
                return lax.associative_scan(join, (jnp.full_like(x, 0.8), x), axis=1)[1]""",
            "product": """
                ages = np.subtract.outer(np.arange(x.shape[1]), np.arange(x.shape[1]))
                return jnp.einsum("ts,bsc->btc", np.tril(0.8 ** np.maximum(ages, 0)), x)""",
        },
    ),
    "running_mean": Piece(
        "running_mean(x)",
        {
            "cumsum": "x.cumsum(dim=1) / torch.arange(1, x.shape[1] + 1)[:, None]",
            "slices": "torch.stack([x[:, : t + 1].mean(dim=1) for t in range(x.shape[1])], dim=1)",
        },
        {
            "cumsum": "jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1)[None, :, None]",
            "scan": "lax.associative_scan(jnp.add, x, axis=1) / (1 + jnp.arange(x.shape[1]))[:, None]",
            "tril": 'jnp.einsum("ts,bsc->btc", np.tri(x.shape[1]) / np.arange(1, x.shape[1] + 1)[:, None], x)',
        },
    ),
    "aggregated": Piece(  # mean of the neighbours' x (B, N, C)
        "aggregated(edges, x)",
        {
            "matmul": "edges.to(x.dtype) @ x / edges.sum(dim=-1, keepdim=True)",
            "einsum": 'torch.einsum("bij,bjc->bic", edges / edges.sum(dim=-1, keepdim=True), x)',
            "where": "torch.where(edges[..., None] > 0, x[:, None], 0).sum(dim=2) / edges.sum(dim=-1)[..., None]",
        },
        {
            "einsum": 'jnp.einsum("bij,bjc->bic", edges.astype(x.dtype), x) / edges.sum(axis=-1, keepdims=True)',
            "mean": "jnp.mean(jnp.tile(x[:, None], (1, x.shape[1], 1, 1)), axis=2, where=edges[..., None])",
            "vmap": "jax.vmap(lambda a, b: a / a.sum(axis=-1, keepdims=True) @ b)(edges, x)",
            "segments": """
                def rows(of, x):
                    ends, sent = jnp.arange(len(x)).repeat(len(x)), of.reshape(-1, 1) * jnp.tile(x, (len(x), 1))
                    sums = jnp.zeros_like(x).at[ends].add(sent)
                    return sums / of.sum(axis=1)[:, None]

                return jax.vmap(rows)(edges, x)""",
        },
    ),
    "routed": Piece(  # softmax over the two largest of three logits
        "routed(logits)",
        {
            "topk": """
                values, chosen = logits.topk(2, dim=-1)
                return torch.zeros_like(logits).scatter(-1, chosen, values.softmax(dim=-1))""",
            "fill": "logits.masked_fill(logits < logits.topk(2, dim=-1)[0][..., 1:], -torch.inf).softmax(dim=-1)",
        },
        {
            "top_k": """
                values, chosen = lax.top_k(logits, 2)
                marks = jax.nn.one_hot(chosen, 3, dtype=logits.dtype)
                return jnp.einsum("bk,bke->be", jax.nn.softmax(values), marks)""",
            "where": """
                kept = logits > logits.min(axis=-1, keepdims=True)
                return jax.nn.softmax(jnp.where(kept, logits, -jnp.inf))""",
            "sort": """
                second = lax.stop_gradient(jnp.sort(logits, axis=-1)[..., 1:2])
                return jax.nn.softmax(logits, axis=-1, where=logits >= second)""",
        },
    ),
    "halved": Piece(  # images: (B, C, H, W) in torch, (B, H, W, C) in jax
        "halved(x)",
        {
            "function": "F.avg_pool2d(x, 2)",
            "layer": "nn.AvgPool2d(2)(x)",
            "reshape": "x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).mean(dim=(3, 5))",
        },
        {
            "reshape": "x.reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).mean(axis=(2, 4))",
            "window": 'lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4',
            "slices": "(x[:, ::2, ::2] + x[:, 1::2, ::2] + x[:, ::2, 1::2] + x[:, 1::2, 1::2]) / 4",
        },
    ),
    "overall": Piece(
        "overall(x)",
        {"mean": "x.mean(dim=(2, 3))", "adaptive": "F.adaptive_avg_pool2d(x, 1).flatten(1)"},
        {
            "mean": "x.mean(axis=(1, 2))",
            "einsum": 'jnp.einsum("bhwc->bc", x) / (x.shape[1] * x.shape[2])',
            "reshape": "x.reshape(len(x), -1, x.shape[-1]).sum(axis=1) * (1 / (x.shape[1] * x.shape[2]))",
        },
    ),
    "doubled": Piece(
        "doubled(x)",
        {
            "interpolate": 'F.interpolate(x, scale_factor=2, mode="nearest")',
            "repeat": "x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)",
        },
        {
            "repeat": "jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)",
            "resize": 'jax.image.resize(x, (len(x), 2 * x.shape[1], 2 * x.shape[2], x.shape[3]), "nearest")',
            "gather": "x[:, jnp.arange(2 * x.shape[1]) // 2][:, :, jnp.arange(2 * x.shape[2]) // 2]",
        },
    ),
}
