"""Faults of the graph network in plain functions."""

from .fault import ABSENT, UnseenFault

FAULTS = {
    "ends_swapped": UnseenFault(
        port="graph",
        edits=(
            (
                "x = attend(layer, x, edges, senders, receivers, real)",
                "x = attend(layer, x, edges, receivers, senders, real)",
            ),
        ),
        ours="messages go from the receivers to the senders",
        reference="they go from the senders to the receivers",
        expects=(
            r"sender|receiver|\bsrc|\bdst|source|destination|\bedge|\bends?\b|ind(ex|ices)|direction|segment",
            r"swap|exchang|revers|opposite|direction|interchang|order|sender|receiver|\bsrc|\bdst|other",
        ),
        jax_lines=("x = attend(layer, x, edges, receivers, senders, real)",),
        torch_lines=(
            "src, dst = edge_index",
            'for end in ("senders", "receivers")])',
            "x = conv(x, edge_index, edge_attr)",
        ),
    ),
    "padding_edges": UnseenFault(
        port="graph",
        edits=(("    strengths = strengths * real\n", ""),),
        ours="edges that only pad take part in the attention",
        reference="they are left out of the graph",
        expects=(
            r"\bpad|mask|\breal\b|select|filter|valid",
            r"edge|count|mul|weight|left out|missing|without|nothing|\bnot\b|includ|\bno\b|real",
        ),
        jax_lines=(
            "strengths = jnp.exp(jax.nn.leaky_relu(scores, 0.2))",
            "totals = jax.ops.segment_sum(strengths, receivers, count)",
        ),
        torch_lines=(
            'real = batch["real"].bool().flatten()',
            'for end in ("senders", "receivers")])',
            'edge_attr = batch["edges"].flatten(0, 1)[real]',
        ),
    ),
    "slope": UnseenFault(
        port="graph",
        edits=(("jax.nn.leaky_relu(scores, 0.2)", "jax.nn.leaky_relu(scores)"),),
        ours="the leaky ReLU has jax's slope, 0.01",
        reference="its slope is 0.2",
        expects=(r"slope|leaky|relu|negative", r"\b0\.2\b|\b0\.01\b"),
        jax_lines=("strengths = jnp.exp(jax.nn.leaky_relu(scores))",),
        torch_lines=("alpha = F.leaky_relu(h[src] @ self.att_src + h[dst] @ self.att_dst, negative_slope=0.2)",),
    ),
    "every_target": UnseenFault(
        port="graph",
        edits=(("(params, *graph)[:, 0]", "(params, *graph)"),),
        ours="predictions (5, 1) are compared with targets (5,), each with every one",
        reference="predictions and targets are both (5,)",
        expects=(r"broadcast|shape|\(5, ?[15]\)|outer|squeeze|\[:, ?0\]|pairs|each other|\bax[ei]s|every|\(B,",),
        jax_lines=(
            "predictions = jax.vmap(predict_one, (None, 0, 0, 0, 0, 0))(params, *graph)",
            'return optax.huber_loss(predictions, batch["target"], delta=0.5).mean() / 0.5',
        ),
        torch_lines=(
            "return self.readout(pooled).squeeze(-1)",
            'return F.smooth_l1_loss(prediction, batch["target"], beta=0.5)',
        ),
    ),
    "residual": UnseenFault(
        port="graph",
        edits=(("return nodes + jax.nn.elu(", "return jax.nn.elu("),),
        ours="a layer returns its update only",
        reference="it returns the sum of its input and its update",
        expects=(r"resid|shortcut|skip connection|add|sum|input|nodes|\bx\b", ABSENT),
        jax_lines=('return jax.nn.elu(linear(layer["update"], received))',),
        torch_lines=("return x + F.elu(self.update(out))",),
    ),
}
