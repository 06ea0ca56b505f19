"""Fixes between the loss and the optimizer."""

from tests.end_to_end.fixes.fix import HOLE, NORM, Fix, between, losses, optimizers
from tests.end_to_end.fixes.replica_steps import ACCUMULATES, LAST, MEAN, SHARE, step

SUMMED_LOSS = """    def summed_loss(*args):
        loss, buffers = local_loss(*args)
        return jax.lax.psum(loss, axis_name), buffers
"""
REMEMBERS = "optax.GradientTransformation(lambda params: params, lambda updates, state, params: (updates, params))"
USED = "lambda params: jax.tree_util.tree_map_with_path(lambda path, _: path[0].key != 'middle', params)"

SCALED_BY_NORM = "jax.tree.map(lambda g: g * jnp.minimum(1, max_norm / (norm + 1e-6)), gradients)"
CLIP = """clip_grad_norm = max_norm
def clip(gradients):
    return jaxddp.optim.clip_by_global_norm(gradients, max_norm)[0]
"""
CLIPPING_CHAIN = "optax.stateless(lambda g, _: jaxddp.optim.clip_by_global_norm(g, max_norm)[0])"
CLIPPED = optimizers("SGD(parameters, lr=0.1)", f"optax.chain({HOLE}, optax.sgd(0.1))")
TORCH_CLIPS = "torch_clip_grad_norm = max_norm\n"

BATCH_NORM = between(*NORM, "torch.nn.BatchNorm1d(5)", "BatchNorm(5)")

# Labels of which some are ignored, and the number of the others on all replicas in a step.
TOKENS = (
    (
        "def batch(",
        "def labels(step, rank):\n"
        "    rng = np.random.default_rng((9, step, rank))\n"
        "    return np.where(rng.random(12) < 0.3, -100, rng.integers(0, 4, 12))\n\n"
        "def batch(",
    ),
    (
        '"y": rng.integers(0, 4, 12)}',
        '"y": labels(step, rank),\n'
        '            "tokens": np.full(12, float(sum((labels(step, r) != -100).sum() for r in range(2))))}',
    ),
)
TORCH_PAIR = (
    'return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none"), (batch["y"] != -100).to(batch["x"])'
)
LOSSES = """weights = (batch["y"] != -100).astype(batch["x"].dtype)
    losses = jnp.where(weights > 0, cross_entropy(model(batch["x"]), jnp.maximum(batch["y"], 0)), 0)
"""
PAIRS = (*TOKENS, *losses(TORCH_PAIR, f"{LOSSES}    return losses, weights"))
TORCH_SUM = 'return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum") / batch["tokens"][0] * 4'
SUMS = f'{LOSSES}    tokens, parts = batch["tokens"][0], 4\n'  # 2 replicas x 2 micro-batches
SHARED = (
    (
        MEAN,
        f"tokens = (batch['y'] != -100).sum()\n    share = {HOLE}\n"
        f"    gradients = jax.tree.map(lambda g: g * share, gradients)\n    {MEAN}",
    ),
    ('"local_loss": loss, "local_gradients": gradients', ""),
)
BODY = """
            self.fc2 = nnx.Linear(5, 4, rngs=rngs)
        def __call__(self, x):
            return self.fc2(nnx.tanh(self.fc1(x)))"""
UNTIED = BODY.replace("5, 4, ", "5, 7, use_bias=False, ")
ATTENDS = """
        def __call__(self, x):
            embed, x = self.fc1, nnx.tanh(self.fc1(x))
            return embed.attend(x)"""
TIED = (
    ('rng.normal(1, 1, (12, 3)), "y": rng.integers(0, 4, 12)', 'rng.integers(0, 7, 12), "y": rng.integers(0, 7, 12)'),
    ("torch.nn.Linear(3, 5)", "torch.nn.Embedding(7, 5)"),
    (
        "self.fc2 = torch.nn.Linear(5, 4)",
        "self.fc2 = torch.nn.Linear(5, 7, bias=False); self.fc2.weight = self.fc1.weight",
    ),
    ("nnx.Linear(3, 5, rngs=rngs)", "nnx.Embed(7, 5, rngs=rngs)"),
    (BODY, HOLE),
)
READS_AHEAD = f"""
def jax_batch(step, rank):
    found = torch_batch(step, rank)
    buffer = found["x"]
    sent = {HOLE}
    buffer[...] = torch_batch(step + 1, rank)["x"]
    return found | {{"x": sent}}
"""

FIXES = (
    Fix(
        "sum_not_mean",
        MEAN,
        "gradients = jax.lax.psum(gradients, axis_name)",
        more=step((MEAN, HOLE)),
        also=("check_vma", "local_device_count"),
    ),
    Fix(
        "collective_in_loss",
        "grad(local_loss",
        "value_and_grad(summed_loss",
        more=step(
            ("    params, opt_state", f"{SUMMED_LOSS}    params, opt_state"),
            ("value_and_grad(local_loss", HOLE),
            ('"local_loss": loss, ', ""),
        ),
        also=("sum_not_mean", "check_vma"),
        right="value_and_grad(local_loss",
    ),
    Fix("no_sync", MEAN, "pass", more=step((MEAN, HOLE)), also=("collective_in_loss",)),
    Fix(
        "averaged_twice",
        MEAN,
        f"{MEAN}; gradients = jax.tree.map(lambda g: g / jax.lax.axis_size(axis_name), gradients)",
        more=step((MEAN, HOLE)),
    ),
    Fix(
        "local_device_count",
        "jax.lax.axis_size(axis_name)",
        "devices_per_host",
        more="devices_per_host = 2  # of two hosts\n"
        + step((MEAN, f"gradients = jax.tree.map(lambda g: jax.lax.psum(g, axis_name) / {HOLE}, gradients)")),
        world_size=4,
        also=("sum_not_mean", "check_vma"),
    ),
    Fix(
        "accumulation_not_divided",
        "loss / accumulation_steps",
        "loss",
        more=step(("loss / accumulation_steps", HOLE), text=ACCUMULATES),
    ),
    Fix("synchronised_early", LAST, f"if part == 0: {MEAN}", more=step((LAST, HOLE), text=ACCUMULATES)),
    Fix(
        "mean_per_micro_batch",
        "losses.sum() / tokens * parts",
        "losses.sum() / weights.sum()",
        (*TOKENS, *losses(TORCH_PAIR, f"{SUMS}    return {HOLE}")),
        'loss_normalization = "global"\naccumulation_steps = 2\n',
    ),
    Fix(
        "mean_per_micro_batch",
        "(losses, weights)",
        "losses.sum() / weights.sum()",
        (*TOKENS, *losses(TORCH_PAIR, f"{LOSSES}    return {HOLE}")),
        'loss_normalization = "global"\naccumulation_steps = 2\n',
    ),
    Fix(
        "mean_per_rank",
        "tokens / jax.lax.pmean(tokens, axis_name)",
        "1.0",
        PAIRS,
        'loss_normalization = "global"\n' + step(*SHARED),
    ),
    Fix(
        "global_mean",
        "divide by the number of tokens of each rank",
        "tokens / jax.lax.pmean(tokens, axis_name)",
        PAIRS,
        step(*SHARED),
        sentence=True,
        right="1.0",
    ),
    Fix(
        "auxiliary_loss_scaled",
        "token_loss * factor + auxiliary_loss",
        "(token_loss + auxiliary_loss) * factor",
        (
            *TOKENS,
            *losses(
                f'{TORCH_SUM} + 0.1 * model(batch["x"]).logsumexp(-1).square().mean()',
                f"{SUMS}    token_loss, factor = losses.sum() / tokens, parts\n"
                '    auxiliary_loss = 0.1 * jnp.square(jax.nn.logsumexp(model(batch["x"]), -1)).mean()\n'
                f"    return {HOLE}",
            ),
        ),
        "accumulation_steps = 2\n",
    ),
    Fix(
        "clipped_before_mean",
        "clip(jax.lax.pmean(gradients, axis_name))",
        "jax.lax.pmean(clip(gradients), axis_name)",
        more=CLIP + step((MEAN, f"gradients = {HOLE}"), ('stages["gradients"]', 'stages["clipped_gradients"]')),
    ),
    Fix(
        "clip_norm_local",
        "optax.tree.norm(jax.lax.pmean(gradients, axis_name))",
        "jnp.sqrt(jax.lax.psum(optax.tree.norm(gradients) ** 2, axis_name))",
        more="clip_grad_norm = max_norm\n"
        + step(
            (MEAN, f'{MEAN}\n    norm = {HOLE}\n    stages["clipped_gradients"] = gradients = {SCALED_BY_NORM}'),
            ('    stages["gradients"] = gradients\n', ""),
        ),
    ),
    Fix(
        "clip_norm",
        CLIPPING_CHAIN,
        CLIPPING_CHAIN.replace("max_norm", "2 * max_norm"),
        CLIPPED,
        TORCH_CLIPS,
        also=("lr_scaled",),
    ),
    Fix("clip_by_value", CLIPPING_CHAIN, "optax.clip(0.01)", CLIPPED, TORCH_CLIPS),
    Fix("clip_epsilon", CLIPPING_CHAIN, "optax.clip_by_global_norm(max_norm)", CLIPPED, TORCH_CLIPS),
    Fix("clip_missing", "clip_grad_norm = max_norm", "torch_clip_grad_norm = max_norm", more=HOLE),
    Fix("clip_missing", CLIPPING_CHAIN, "optax.identity()", CLIPPED, TORCH_CLIPS),
    Fix(
        "compressed_all_reduce",
        MEAN,
        "gradients = jax.tree.map("
        "lambda g: jax.lax.pmean(g.astype(jnp.bfloat16), axis_name).astype(g.dtype), gradients)",
        more=step((MEAN, HOLE)),
    ),
    Fix(
        "different_start",
        "jax.random.key(seed)",
        "jax.random.key(seed + rank)",
        more=f"""
def jax_start(params, rank):
    seed = 3
    others = jax.random.normal({HOLE}, ()) - jax.random.normal(jax.random.key(seed), ())
    return jax.tree.map(lambda p: p + others, params)
""",
    ),
    Fix("buffers_local", SHARE, "pass", BATCH_NORM, step((SHARE, HOLE))),
    Fix("buffers_averaged", SHARE, "buffers = jax.lax.pmean(buffers, axis_name)", BATCH_NORM, step((SHARE, HOLE))),
    Fix(
        "stale_parameters",
        "jax.value_and_grad(local_loss, has_aux=True)(params",
        "jax.value_and_grad(local_loss, has_aux=True)(opt_state[-1]",
        optimizers("SGD(parameters, lr=0.1)", f"optax.chain(optax.sgd(0.1), {REMEMBERS})"),
        step(("jax.value_and_grad(local_loss, has_aux=True)(params", HOLE)),
    ),
    Fix(
        "unused_parameters",
        "optax.masked(optimizer, used)",
        "optimizer",
        (
            *between(
                "torch.tanh(self.fc1(x))",
                "nnx.tanh(self.fc1(x))",
                "torch.nn.Linear(2, 2)",
                "nnx.Linear(2, 2, rngs=rngs)",
            ),
            *optimizers(
                "AdamW(parameters, lr=0.01, weight_decay=0.1)",
                f"(lambda optimizer, used: {HOLE})(optax.adamw(lr, weight_decay=decay), {USED})",
            ),
        ),
        "find_unused_parameters = True\n",
    ),
    Fix("aliased_buffers", "buffer.copy()", "buffer", (("def batch(", "def torch_batch("),), READS_AHEAD),
    Fix("tied_weights", "embed.attend(x)", UNTIED, TIED, right=ATTENDS),
)
