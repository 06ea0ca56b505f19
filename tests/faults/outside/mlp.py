"""Faults of the regressor's port: the model's constants and calls, SGD's schedule, state and groups, and samples."""

from functools import partial

from .fault import OutsideFault

fault = partial(OutsideFault, "mlp")
RATE = "return LR * 0.5 * (1 + jnp.cos(jnp.pi * count / STEPS))"
COSINE = "CosineAnnealingLR(optimizer, T_max=STEPS)"
CHAIN = "jax_optimizer = optax.chain(optax.trace(MOMENTUM), optax.scale_by_learning_rate(rate))"
SGD = "torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)"
LABELS = """\


def is_bias(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "bias", params)


"""

FAULTS = {
    "slope": fault(
        "constant",
        (("jax.nn.leaky_relu(self.fc1(x), 0.2)", "jax.nn.leaky_relu(self.fc1(x))"),),
        ours="negative_slope 0.01",
        reference="negative_slope 0.2",
        expects=("slope|leaky_relu", r"\b0\.01\b", r"\b0\.2\b"),
        place="fc1|leaky_relu",
        jax_line="jax.nn.leaky_relu(",
        torch_line="F.leaky_relu(",
    ),
    "scale": fault(
        "constant",
        (("return 0.5 * self.head(x)", "return 0.25 * self.head(x)"),),
        ours="outputs times 0.25",
        reference="outputs times 0.5",
        expects=(r"\b0\.25\b|\b0\.5\b", "scale|factor|multipl|times|constant"),
        place="head",
        jax_line="0.25 * self.head",
        torch_line="0.5 * self.head",
    ),
    "standardised_by": fault(
        "constant",
        (("x = (x - 0.5) / 0.25", "x = (x - 0.5) / 0.5"),),
        ours="inputs divided by 0.5",
        reference="inputs divided by 0.25",
        expects=(r"\b0\.5\b", r"\b0\.25\b", "divi|div|scale"),
        place="fc1",
        jax_line="(x - 0.5) / 0.5",
        torch_line="(x - 0.5) / 0.25",
    ),
    "residual_left_out": fault(
        "call dropped",
        (("x = x + jax.nn.silu(self.gate(h)) * self.up(h)", "x = jax.nn.silu(self.gate(h)) * self.up(h)"),),
        ours="no residual connection around gate and up",
        reference="x + silu(gate) * up",
        expects=("residual|addition|left out|missing|not added|skip", "gate|up|add"),
        place="head|up",
        jax_line="jax.nn.silu(",
        torch_line="F.silu(",
    ),
    "sigmoid_for_silu": fault(
        "call",
        (("jax.nn.silu(self.gate(h))", "jax.nn.sigmoid(self.gate(h))"),),
        ours="sigmoid",
        reference="silu",
        expects=("sigmoid", "silu"),
        place="gate|silu",
        jax_line="jax.nn.sigmoid(",
        torch_line="F.silu(",
    ),
    "huber_delta": fault(
        "constant",
        (("delta=0.5).mean()", "delta=1.0).mean()"),),
        ours="delta 1",
        reference="delta 0.5",
        expects=("delta|huber", r"\b1(\.0)?\b", r"\b0\.5\b"),
        place="huber",
        jax_line="optax.huber_loss(",
        torch_line="F.huber_loss(",
    ),
    "momentum_reset": fault(
        "state",
        (
            (
                "opt_state = state.opt_state\n",
                "fresh = optimizer.init(state.params)[0]\n"
                "    begins = state.step % STEPS_PER_EPOCH == 0\n"
                "    trace = jax.tree.map(lambda new, old: jnp.where(begins, new, old), fresh, state.opt_state[0])\n"
                "    opt_state = (trace, *state.opt_state[1:])\n",
            ),
        ),
        ours="momentum is 0 again at the beginning of each epoch of 4 steps",
        reference="momentum is kept",
        expects=("momentum|state", "reset|lost|fresh|zero", r"\b4\b|epoch"),
        place="momentum",
        jax_line="trace = jax.tree.map",
        torch_line=SGD,
        stage="update",
        step=5,
        known="state_reset",
    ),
    "schedule_by_epoch": fault(
        "schedule",
        ((RATE, "return LR * 0.5 * (1 + jnp.cos(jnp.pi * (count // STEPS_PER_EPOCH) * STEPS_PER_EPOCH / STEPS))"),),
        ours="the rate changes every 4 steps, at each epoch",
        reference="the rate changes at each step",
        expects=("rate|schedule", "epoch|every 4|4 steps"),
        place="rate|schedule",
        jax_line="count // STEPS_PER_EPOCH",
        torch_line=COSINE,
        stage="update",
        step=2,
    ),
    "schedule_stretched": fault(
        "schedule",
        ((RATE, "return LR * 0.5 * (1 + jnp.cos(jnp.pi * count / (2 * STEPS)))"),),
        ours="the cosine takes 20 steps",
        reference="the cosine takes 10 steps",
        expects=("rate|schedule", r"\b20\b|twice|half|stretched|slow|\b2\b|\b0\.5\b"),
        place="rate|schedule",
        jax_line="jnp.cos(",
        torch_line=COSINE,
        stage="update",
        step=2,
    ),
    "schedule_restarted": fault(
        "schedule",
        ((RATE, "return LR * 0.5 * (1 + jnp.cos(jnp.pi * (count % STEPS_PER_EPOCH) / STEPS))"),),
        ours="the schedule starts again every 4 steps",
        reference="the schedule runs through",
        expects=("rate|schedule", "restart|again|cycl|period", r"\b4\b|epoch"),
        place="rate|schedule",
        jax_line="count % STEPS_PER_EPOCH",
        torch_line=COSINE,
        stage="update",
        step=5,
    ),
    "rate_floor": fault(
        "schedule",
        ((RATE, "return LR * (0.1 + 0.9 * 0.5 * (1 + jnp.cos(jnp.pi * count / STEPS)))"),),
        ours="the cosine ends at 0.1 of the rate",
        reference="the cosine ends at 0",
        expects=("rate|schedule", r"ends|floor|least|minimum|eta_min|alpha|\b0\.01\b|\b0\.1\b"),
        place="rate|schedule",
        jax_line="0.1 + 0.9",
        torch_line=COSINE,
        stage="update",
        step=2,
    ),
    "rate_for_biases": fault(
        "tensor group",
        (
            (
                CHAIN,
                "rates = {True: optax.scale_by_learning_rate(lambda count: 2 * rate(count)), "
                "False: optax.scale_by_learning_rate(rate)}"
                f"{LABELS}jax_optimizer = optax.chain(optax.trace(MOMENTUM), optax.partition(rates, is_bias))",
            ),
        ),
        ours="biases have twice the rate",
        reference="one rate for all",
        expects=("rate", "bias", r"\b2\b|twice|double"),
        place="bias",
        jax_line="2 * rate(count)",
        torch_line=SGD,
        stage="update",
        known="rate_of_some",
    ),
    "labels_shifted": fault(
        "samples",
        (('"y": y[chosen]}', '"y": y[np.roll(chosen, -1)] if rank == 1 else y[chosen]}'),),
        ours="labels of replica 1 are those of the next example",
        reference="each example has its own label",
        expects=(r"\by\b|label|target", "shift|next|roll|other example|off by|order", r"\b1\b"),
        place=r"\by\b",
        jax_line="np.roll(chosen, -1)",
        torch_line='"y": y[chosen]}',
        stage="samples",
    ),
    "contiguous_shards": fault(
        "samples",
        (("order[rank::REPLICAS]", "order.reshape(REPLICAS, -1)[rank]"),),
        ours="each replica has a contiguous half of the epoch",
        reference="each replica has every second example",
        expects=("contiguous|block|half|shard|interleav|every second|stride",),
        place="ids|samples",
        jax_line="order.reshape(REPLICAS, -1)",
        torch_line="order[rank::REPLICAS]",
        stage="samples",
    ),
}
