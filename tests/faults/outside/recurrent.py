"""Faults of the tagger's port: gates, states, directions, dropout, clipping, decay, and groups of tensors."""

from functools import partial

from .fault import OutsideFault

fault = partial(OutsideFault, "recurrent")
GATES = 'i, f, g, o = jnp.split(x_t @ p["w_x"]'
LSTM = "self.lstm = nn.LSTM("
GRU = "self.gru = nn.GRU("

FAULTS = {
    "gate_order": fault(
        "order",
        ((GATES, GATES.replace("i, f, g, o", "i, g, f, o")),),
        ours="gates are i, g, f, o",
        reference="gates are i, f, g, o",
        expects=("gate|chunk|split", r"order|swapped|i, ?g, ?f, ?o|exchanged"),
        place="lstm",
        jax_line="i, g, f, o = jnp.split(",
        torch_line=LSTM,
    ),
    "forget_bias": fault(
        "constant",
        (("c = jax.nn.sigmoid(f) * c", "c = jax.nn.sigmoid(f + 1) * c"),),
        ours="1 is added to the forget gate",
        reference="nothing is added to the forget gate",
        expects=("forget|gate|bias|lstm", r"\b1(\.0)?\b"),
        place="lstm",
        jax_line="jax.nn.sigmoid(f + 1)",
        torch_line=LSTM,
    ),
    "output_without_tanh": fault(
        "call dropped",
        (("h = jax.nn.sigmoid(o) * jnp.tanh(c)", "h = jax.nn.sigmoid(o) * c"),),
        ours="h = o c",
        reference="h = o tanh(c)",
        expects=("tanh", "left out|missing|dropped|no tanh|not called|without"),
        place="lstm",
        jax_line="h = jax.nn.sigmoid(o) * c",
        torch_line=LSTM,
    ),
    "reset_before_product": fault(
        "order of calls",
        (
            (
                'h @ p["w_h"] + p["b_h"], 3, axis=-1)',
                'h @ p["w_h"] + p["b_h"], 3, axis=-1)\n        w_n, b_n = p["w_h"][:, -HIDDEN:], p["b_h"][-HIDDEN:]',
            ),
            ("n = jnp.tanh(n_x + r * n_h)", "n = jnp.tanh(n_x + (r * h) @ w_n + b_n)"),
        ),
        ours="the reset gate multiplies the state before the product with the weights",
        reference="the reset gate multiplies the product",
        expects=("reset|gru", "before|after|product|order|matmul|hidden"),
        place="gru",
        jax_line="(r * h) @ w_n",
        torch_line=GRU,
    ),
    "update_gate_complement": fault(
        "order",
        (("h = (1 - z) * n + z * h", "h = z * n + (1 - z) * h"),),
        ours="h = z n + (1 - z) h",
        reference="h = (1 - z) n + z h",
        expects=("gate|gru|update", "1 - z|complement|swapped|exchanged|inverse|negat"),
        place="gru",
        jax_line="h = z * n + (1 - z) * h",
        torch_line=GRU,
    ),
    "state_reset_between_chunks": fault(
        "state",
        (
            (
                'lstm(params["lstm"], second, jax.lax.stop_gradient(state))',
                'lstm(params["lstm"], second, (zeros, zeros))',
            ),
        ),
        ours="the second chunk starts from zeros",
        reference="the second chunk starts from the state of the first",
        expects=("state|hidden|h_0|hx", "zero|reset|not carried|left out|dropped|fresh"),
        place="lstm",
        jax_line="second, (zeros, zeros)",
        torch_line="two, _ = self.lstm(second",
    ),
    "state_not_stopped": fault(
        "gradient",
        (("second, jax.lax.stop_gradient(state))", "second, state)"),),
        ours="gradients flow into the first chunk",
        reference="the state is detached between the chunks",
        expects=("detach|stop_gradient|gradient flows|stopped",),
        place="lstm|detach",
        jax_line="second, state)",
        torch_line="h.detach()",
        stage="local_gradients",
    ),
    "not_turned_back": fault(
        "order",
        (('gru(params["gru_reverse"], x, reverse=True)', 'gru(params["gru_reverse"], x[:, ::-1])'),),
        ours="outputs of the backward direction stay in reversed order",
        reference="outputs of the backward direction are in the order of the words",
        expects=("revers|flip|turned|backward", "order|time|sequence|outputs|axis|flip|positions"),
        place="gru|tags",
        jax_line="x[:, ::-1]",
        torch_line=GRU,
    ),
    "read_forwards_twice": fault(
        "order",
        (("x, reverse=True)\n", "x)\n"),),
        ours="both directions read forwards",
        reference="one direction reads backwards",
        expects=("revers|backward|direction|flip", "forward|missing|not|left out|dropped|order"),
        place="gru|tags",
        jax_line='gru(params["gru_reverse"], x)',
        torch_line=GRU,
    ),
    "directions_swapped": fault(
        "order",
        (("jnp.concatenate([forwards, backwards]", "jnp.concatenate([backwards, forwards]"),),
        ours="backwards before forwards",
        reference="forwards before backwards",
        expects=("order|swapped|channels|direction", "cat|concat|channels|direction|gru"),
        place="tags|gru",
        jax_line="jnp.concatenate([backwards",
        torch_line="self.gru = nn.GRU(",
    ),
    "output_bias_left_out": fault(
        "call dropped",
        ((' + params["tags"]["bias"]', ""),),
        ours="the last layer adds no bias",
        reference="the last layer adds its bias",
        expects=("bias", "left out|missing|dropped|no bias|not added|without|unused"),
        place="tags",
        jax_line='both @ params["tags"]["kernel"]',
        torch_line="self.tags = nn.Linear(",
    ),
    "dropout_not_rescaled": fault(
        "call dropped",
        (("jnp.where(kept, x / (1 - RATE), 0.0)", "jnp.where(kept, x, 0.0)"),),
        ours="kept values stay as they are",
        reference="kept values are divided by 0.75",
        expects=("dropout", r"0\.75|1\.33|rescal|scale|divi|1 - p"),
        place="embedding|dropout",
        jax_line="jnp.where(kept, x, 0.0)",
        torch_line="F.dropout(",
    ),
    "mean_over_padding": fault(
        "mask",
        (('(losses * batch["valid"]).sum() / batch["valid"].sum()', "losses.mean()"),),
        ours="the mean of all losses",
        reference="the mean of the losses of valid words",
        expects=("mean|sum|loss", "padding|mask|valid|all elements|weights|ignore"),
        place="cross_entropy|valid",
        jax_line="return losses.mean()",
        torch_line="(losses * valid).sum()",
    ),
    "clip_by_value": fault(
        "call",
        (
            (
                "factor = jnp.minimum(1, MAX_NORM / (optax.tree.norm(gradients) + 1e-6))\n"
                "    return jax.tree.map(lambda g: factor * g, gradients)",
                "return jax.tree.map(lambda g: jnp.clip(g, -0.05, 0.05), gradients)",
            ),
        ),
        ours="each element is clipped to 0.05",
        reference="the norm is clipped to 0.3",
        expects=("clip", r"value|element|\b0\.05\b", "norm"),
        place="clip",
        jax_line="jnp.clip(g, -0.05, 0.05)",
        torch_line="clip_grad_norm = 0.3",
        stage="clipped_gradients",
        known="clip_by_value",
    ),
    "decay_after_update": fault(
        "order of calls",
        (
            ("optax.adamw(LR, weight_decay=DECAY)", "optax.adam(LR)"),
            (
                "params = optax.apply_updates(state.params, updates)\n",
                "params = optax.apply_updates(state.params, updates)\n"
                "    params = jax.tree.map(lambda p: (1 - LR * DECAY) * p, params)\n",
            ),
        ),
        ours="the updated weights decay",
        reference="the weights decay, and then are updated",
        expects=("decay", "after|before|order|updated"),
        place="decay",
        jax_line="(1 - LR * DECAY) * p",
        torch_line="torch.optim.AdamW(",
        stage="update",
    ),
    "biases_not_averaged": fault(
        "tensor group",
        (
            (
                'averaged = jax.lax.pmean(gradients, "replica")',
                'averaged = jax.tree.map(lambda g: jax.lax.pmean(g, "replica") if g.ndim > 1 else g, gradients)',
            ),
        ),
        ours="gradients of biases are not averaged over the replicas",
        reference="all gradients are averaged over the replicas",
        expects=("averag|mean|sync|reduc", "bias|b_x|one dimension|1-d|vector"),
        place="bias",
        jax_line="if g.ndim > 1 else g",
        torch_line="torch.optim.AdamW(",
        stage="gradients",
    ),
}
