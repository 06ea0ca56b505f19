"""Faults of the encoder-decoder in Haiku."""

from .fault import UnseenFault

FAULTS = {
    "gate_order": UnseenFault(
        port="seq2seq",
        edits=(("i, f, g, o = jnp.split", "i, g, f, o = jnp.split"),),
        ours="the gates are in the order input, cell, forget, output",
        reference="they are in the order input, forget, cell, output",
        expects=(
            r"gate|chunk|split|order|swap|permut|exchang|\bparts?\b|slice|\bi, ?[fg]",
            r"\bg\b|\bcell\b|candidate|order|swap|second|third|exchang|permut|\bparts?\b|chunk|slot",
        ),
        jax_lines=("i, g, f, o = jnp.split(gates, 4, axis=-1)", "c = jax.nn.sigmoid(f + 1.0) * c"),
        torch_lines=(
            "i, f, g, o = (self.ih(x) + self.hh(h)).chunk(4, dim=-1)",
            "c = forget * c + torch.sigmoid(i) * torch.tanh(g)",
        ),
    ),
    "forget_offset": UnseenFault(
        port="seq2seq",
        edits=(("jax.nn.sigmoid(f + 1.0)", "jax.nn.sigmoid(f)"),),
        ours="nothing is added to the forget gate",
        reference="1 is added to it before the sigmoid",
        expects=(r"\b1(\.0)?\b|\bone\b", r"forget|\badd|bias|offset|\+|plus|gate"),
        jax_lines=("c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)",),
        torch_lines=("forget = torch.sigmoid(f + 1.0)",),
    ),
    "final_state": UnseenFault(
        port="seq2seq",
        edits=(
            (
                "return jnp.take_along_axis(states, (lengths - 1)[:, None, None], axis=1)[:, 0]",
                "return states[:, -1]",
            ),
        ),
        ours="the decoder begins with the state after the padding",
        reference="it begins with the state after the last word; padding does not change the state",
        expects=(
            r"\blast\b|final|\[:, ?-1\]|length|time step|position|valid|alive|\bstates?\b",
            r"pad|length|valid|mask|position|where|select|gather|alive|state|each sentence|step|carried",
        ),
        jax_lines=("return states[:, -1]", "state = last(memory, lengths), last(jnp.stack(cells, axis=1), lengths)"),
        torch_lines=(
            "h, c = torch.where(alive, new_h, h), torch.where(alive, new_c, c)",
            "alive = (src[:, t] != PAD).unsqueeze(-1)",
        ),
    ),
    "attention_mask": UnseenFault(
        port="seq2seq",
        edits=(
            (
                "weights = jax.nn.softmax(jnp.where(is_word, scores, -1e30), axis=-1)",
                "weights = jax.nn.softmax(scores, axis=-1) * is_word",
            ),
        ),
        ours="the padding's weights are set to 0 after the softmax, so that the others do not sum to 1",
        reference="padding is masked before the softmax",
        expects=(
            r"mask|padd|where|fill|\binf|is_word",
            r"softmax|renormal|normali[sz]|sum to|weights|score|energy|logit",
        ),
        jax_lines=("weights = jax.nn.softmax(scores, axis=-1) * is_word",),
        torch_lines=('alpha = energy.masked_fill(padding, float("-inf")).softmax(dim=-1)',),
    ),
    "sentence_means": UnseenFault(
        port="seq2seq",
        edits=(
            (
                "return jnp.sum(losses * counted) / jnp.sum(counted)",
                "return jnp.mean(jnp.sum(losses * counted, axis=1) / jnp.sum(counted, axis=1))",
            ),
        ),
        ours="the loss is the mean over the sentences of each one's mean",
        reference="it is the mean over all words of the batch",
        expects=(
            r"mean|averag|normali|weight|divid|sum",
            r"sentence|sequence|example|\brow|per[- ](token|batch|word)|axis|each|tokens|words",
        ),
        jax_lines=("return jnp.mean(jnp.sum(losses * counted, axis=1) / jnp.sum(counted, axis=1))",),
        torch_lines=("return F.cross_entropy(logits.transpose(1, 2), tgt, ignore_index=PAD)",),
    ),
}
