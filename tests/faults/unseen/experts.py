"""Faults of the mixture of experts in flax.nnx."""

from .fault import UnseenFault

FAULTS = {
    "gates_of_all": UnseenFault(
        port="experts",
        edits=(
            (
                "best, chosen = jax.lax.top_k(scores, CHOICES)\n        gates = jax.nn.softmax(best, axis=-1)",
                "gates, chosen = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), CHOICES)",
            ),
        ),
        ours="the gates are the two largest of a softmax over all experts, and do not sum to 1",
        reference="they are the softmax of the two largest logits",
        expects=(
            r"softmax|normali|gate|top.?k",
            r"before|after|renormal|over all|all (the )?(experts|\d)|order|sum to|sum of|chosen|top.?k|moved|place",
        ),
        jax_lines=("gates, chosen = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), CHOICES)",),
        torch_lines=(
            "top_weights = top_logits.softmax(dim=-1)",
            "top_logits, top_idx = router_logits.topk(TOP_K, dim=-1)",
        ),
    ),
    "balance_factor": UnseenFault(
        port="experts",
        edits=(("balance = EXPERTS * jnp.dot(shares, loads)", "balance = jnp.dot(shares, loads)"),),
        ours="the balance loss is the product of shares and loads",
        reference="it is that product times 5, the number of experts",
        expects=(
            r"mul|times|scal|factor|weight|coefficient|divi",
            r"\b5(\.0)?\b|\b0\.2\b|\b0\.25\b|expert|balance",
        ),
        jax_lines=("balance = jnp.dot(shares, loads)", "return mixed, 0.05 * balance + 0.01 * jnp.mean(size**2)"),
        torch_lines=(
            "balance_loss = N_EXPERTS * (probs.mean(0) * first.mean(0)).sum()",
            "return y.view_as(x), BALANCE_COEF * balance_loss + Z_COEF * z_loss",
        ),
    ),
    "softmax_axis": UnseenFault(
        port="experts",
        edits=(("weights = jax.nn.softmax(scores, axis=-1)", "weights = jax.nn.softmax(scores, axis=-2)"),),
        ours="the attention's softmax is over the queries",
        reference="it is over the keys",
        expects=(
            r"\bax[ei]s|\bdims?\b|dimension|quer|\bkeys|transpos",
            r"softmax|normali|weights|attention",
        ),
        jax_lines=("weights = jax.nn.softmax(scores, axis=-2)",),
        torch_lines=("y = att.softmax(dim=-1) @ v",),
    ),
    "head_layout": UnseenFault(
        port="experts",
        edits=(
            (
                "return y.reshape(*y.shape[:2], HEADS, DIM // HEADS)",
                "return y.reshape(*y.shape[:2], DIM // HEADS, HEADS).swapaxes(2, 3)",
            ),
        ),
        ours="a head is every fourth element of a projection",
        reference="it is four consecutive elements",
        expects=(
            r"head|reshap|split|layout|view|unflatten|query|key|projection",
            r"order|interleav|swap|transpos|layout|stride|fast|slow|major|permut|reshap|unflatten|every|consecutive",
        ),
        jax_lines=("return y.reshape(*y.shape[:2], DIM // HEADS, HEADS).swapaxes(2, 3)",),
        torch_lines=("return x.unflatten(-1, (N_HEADS, -1)).transpose(1, 2)",),
    ),
    "router_in_bfloat16": UnseenFault(
        port="experts",
        edits=(
            (
                'scores = jnp.einsum("btd,de->bte", x, self.router[...])',
                'scores = jnp.einsum("btd,de->bte", x, self.router[...]).astype(jnp.bfloat16).astype(x.dtype)',
            ),
        ),
        ours="the router's logits are rounded to bfloat16",
        reference="they are not rounded",
        expects=(r"bfloat16|bf16|16[- ]bit|round|precision|\bcast",),
        jax_lines=(".astype(jnp.bfloat16).astype(x.dtype)",),
        torch_lines=("router_logits = self.router(tokens)",),
    ),
}
