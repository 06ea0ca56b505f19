"""Faults of the two towers in flax.linen."""

from .fault import ABSENT, UnseenFault

FAULTS = {
    "scale_without_exp": UnseenFault(
        port="contrastive",
        edits=(("scale = jnp.exp(log_scale)", "scale = log_scale"),),
        ours="the similarities are multiplied by the logarithm of the scale",
        reference="they are multiplied by its exp",
        expects=(r"\bexp\b|\bexp\(|exponent", ABSENT + r"|logarithm|\blog\b|identity"),
        jax_lines=("scale = log_scale", 'return scale * jnp.einsum("id,jd->ij", pictures, captions)'),
        torch_lines=("return self.logit_scale.exp() * image_features @ text_features.t()",),
    ),
    "one_direction": UnseenFault(
        port="contrastive",
        edits=(
            (
                "of_captions = -jnp.diag(jax.nn.log_softmax(logits, axis=0))",
                "of_captions = -jnp.diag(jax.nn.log_softmax(logits, axis=1))",
            ),
        ),
        ours="the captions' loss has its softmax over the captions, axis 1, too",
        reference="it has its softmax over the pictures: the logits are transposed",
        expects=(
            r"\bax[ei]s|\bdims?\b|transpos|\.t\b|\bt\(\)|direction|\brow|column|along|over|symmetr",
            r"softmax|logsumexp|cross|loss|transpos|direction|twice|both|symmetr|column|caption|text|logits",
        ),
        jax_lines=("of_captions = -jnp.diag(jax.nn.log_softmax(logits, axis=1))",),
        torch_lines=("text_loss = F.cross_entropy(logits_per_image.t(), labels)",),
    ),
    "padding_in_mean": UnseenFault(
        port="contrastive",
        edits=(("mean = jnp.where(is_word, x, 0).sum(axis=1) / is_word.sum(axis=1)", "mean = x.mean(axis=1)"),),
        ours="a caption's mean counts the padding",
        reference="it counts words only",
        expects=(
            r"\bpad|mask|is_word|where|length|\b7\b",
            r"mean|averag|pool|divi|sum|denominator|count|mul|without|nothing|left out|missing",
        ),
        jax_lines=("mean = x.mean(axis=1)",),
        torch_lines=("x = (x * mask).sum(dim=1) / mask.sum(dim=1)",),
    ),
    "scale_ceiling": UnseenFault(
        port="contrastive",
        edits=(("scale = jnp.exp(log_scale)", "scale = jnp.minimum(jnp.exp(log_scale), 10.0)"),),
        ours="the scale is at most 10",
        reference="it has no limit",
        expects=(
            r"clamp|clip|\bcap|minimum|\bmin\b|limit|ceiling|bound|at most|upper",
            r"\b10(\.0)?\b|scale|exp|temperature",
        ),
        jax_lines=("scale = jnp.minimum(jnp.exp(log_scale), 10.0)",),
        torch_lines=("return self.logit_scale.exp() * image_features @ text_features.t()",),
    ),
    "second_beta": UnseenFault(
        port="contrastive",
        edits=(("1e-3, b2=0.98, eps=1e-6", "1e-3, eps=1e-6"),),
        ours="the second beta is Optax's default, 0.999",
        reference="it is 0.98",
        expects=(r"beta|\bb2\b|second moment|mean square|squared", r"\b0\.98\b|\b0\.999\b"),
        jax_lines=("jax_optimizer = optax.adamw(1e-3, eps=1e-6, weight_decay=0.2)",),
        torch_lines=("return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)",),
    ),
}
