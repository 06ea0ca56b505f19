"""Fixes of the optimizer and its schedule, one for each advice.

`test_the_code_of_a_fix_makes_torchs_updates` applies each to the optimizers whose code it depends on.
"""

from tests.end_to_end.fixes.fix import HOLE, Fix, optimizers
from tests.end_to_end.fixes.replica_steps import APPLY, step
from tests.support.small_port import Change

ADAM = "Adam(parameters, lr=0.01)"
ADAMW = "AdamW(parameters, lr=0.01, weight_decay=0.1)"
SGD = "SGD(parameters, lr=0.01, momentum=0.9)"
RMSPROP = "RMSprop(parameters, lr=0.01)"
GROUPS = "AdamW([{'params': [p], 'weight_decay': decay * (p.ndim > 1)} for p in parameters], lr=0.01)"
FORGETS_CORRECTION = """def scale_by_uncorrected_adam(b1=0.9, b2=0.999, eps=1e-8):
    def update(gradients, state, params=None):
        mean = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state[0], gradients)
        square = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state[1], gradients)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mean, square), (mean, square)
    return optax.GradientTransformation(lambda params: (jax.tree.map(jnp.zeros_like, params),) * 2, update)
"""

FORGETS = """def forgetting(inner):
    def update(gradients, state, params=None):
        count, kept = state
        kept = jax.tree.map(lambda new, old: jnp.where(count % 3 == 0, new, old), inner.init(params), kept)
        updates, kept = inner.update(gradients, kept, params)
        return updates, (count + 1, kept)
    return optax.GradientTransformation(lambda params: (jnp.int32(0), inner.init(params)), update)
"""
SKIPS = """def without_every_third(inner):
    def update(gradients, state, params=None):
        count, kept = state
        updates, kept = inner.update(gradients, kept, params)
        return jax.tree.map(lambda u: jnp.where((count + 1) % 3, u, 0.0), updates), (count + 1, kept)
    return optax.GradientTransformation(lambda params: (jnp.int32(0), inner.init(params)), update)
"""
OF_BIASES = """def labels(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, p: "bias" if "bias" in jax.tree_util.keystr(path) else "other", params)
"""

COSINE = """
def torch_scheduler(optimizer): return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
"""
SCHEDULE = "schedule = optax.cosine_decay_schedule(lr, 8)\n"
WARM = """
def torch_scheduler(optimizer):
    from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.25, total_iters=2), CosineAnnealingLR(optimizer, 10)], [2])
"""
RATES = "first_rate, highest_rate, steps, last_step = 0.025, 0.1, 2, 12\n"
FROM = "init_value=first_rate, peak_value=highest_rate, warmup_steps=steps, decay_steps=last_step"


def preceded(code: str, changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """Put code before what the changes put in."""
    return tuple((old, code + new) for old, new in changes)


SCHEDULED = preceded(SCHEDULE, optimizers(SGD, f"optax.sgd(lambda t: {HOLE}, 0.9)"))

FIXES = (
    Fix(
        "optimizer_option",
        "jaxddp.optim.nadam(lr, betas=(0.9, 0.999), eps=1e-8, momentum_decay=0.01)",
        "jaxddp.optim.nadam(lr)",
        optimizers("NAdam(parameters, lr=0.01, momentum_decay=0.01)"),
    ),
    Fix(
        "optax_rule",
        "jaxddp.optim.nadam(lr, betas=(0.9, 0.999), eps=1e-8, momentum_decay=0.004)",
        "optax.nadam(lr)",
        optimizers("NAdam(parameters, lr=0.01)"),
    ),
    Fix(
        "state_reset",
        "make the optimizer's state once",
        "forgetting(optax.sgd(lr, momentum=0.9))",
        preceded(FORGETS, optimizers(SGD)),
        right="optax.sgd(lr, momentum=0.9)",
        sentence=True,
        steps=7,
    ),
    Fix(
        "updates_skipped",
        "make an update at each step",
        "without_every_third(optax.sgd(lr, momentum=0.9))",
        preceded(SKIPS, optimizers(SGD)),
        right="optax.sgd(lr, momentum=0.9)",
        sentence=True,
        steps=7,
    ),
    Fix(
        "gradients_applied",
        "updates, opt_state = optimizer.update(gradients, opt_state, params), then "
        "params = optax.apply_updates(params, updates)",
        "params = optax.apply_updates(params, gradients)",
        optimizers(ADAM, "optax.adam(lr)"),
        step((APPLY, HOLE)),
        right=APPLY,
        sentence=True,
    ),
    Fix(
        "rate_of_some",
        "the same rate for each label of optax.partition",
        'optax.partition({"bias": optax.adam(2 * lr), "other": optax.adam(lr)}, labels)',
        preceded(OF_BIASES, optimizers(ADAM)),
        right='optax.partition({"bias": optax.adam(lr), "other": optax.adam(lr)}, labels)',
        sentence=True,
    ),
    Fix(
        "coupled_decay",
        "optax.adamw(lr, weight_decay=0.1)",
        "optax.chain(optax.add_decayed_weights(decay), optax.adam(lr))",
        optimizers(ADAMW),
    ),
    Fix(
        "coupled_decay",
        "optax.chain(optax.add_decayed_weights(0.1), optax.adam(lr))",
        "optax.adamw(lr, weight_decay=decay)",
        optimizers("Adam(parameters, lr=0.01, weight_decay=0.1)"),
    ),
    Fix(
        "decay_value", "optax.adamw(lr, weight_decay=0.01)", "optax.adamw(lr)", optimizers("AdamW(parameters, lr=0.01)")
    ),
    Fix("decay_value", "optax.adam(lr)", "optax.adamw(lr, weight_decay=0.01)", optimizers(ADAM)),
    Fix(
        "decay_without_lr",
        "optax.adamw(lr, weight_decay=0.1)",
        "optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(lr), optax.add_decayed_weights(-decay))",
        optimizers(ADAMW),
    ),
    Fix(
        "decay_mask",
        "mask = lambda params: "
        "jax.tree_util.tree_map_with_path(lambda path, p: 'kernel' in jax.tree_util.keystr(path), params)",
        "mask = None",
        preceded(f"{HOLE}\n", optimizers(GROUPS, "optax.adamw(lr, weight_decay=0.1, mask=mask)")),
    ),
    Fix(
        "eps_in_root",
        "optax.rmsprop(lr, decay=0.99, eps=1e-8, eps_in_sqrt=False)",
        "optax.rmsprop(lr, decay=0.99)",
        optimizers(RMSPROP),
    ),
    Fix("eps_value", "optax.adam(lr, eps=1e-6)", "optax.adam(lr)", optimizers("Adam(parameters, lr=0.01, eps=1e-6)")),
    Fix(
        "loss_scale",
        "optax.scale(1 / scale)",
        "optax.adam(lr, eps=eps)",
        preceded(
            "scale = 1024.0\n",
            optimizers("Adam(parameters, lr=0.01, eps=1e-6)", f"optax.chain(optax.scale(scale), {HOLE})"),
        ),
        right="optax.chain(optax.scale(1 / scale), optax.adam(lr, eps=eps))",
    ),
    Fix(
        "loss_scale",
        "optax.squared_error(prediction, target).mean()",
        "optax.l2_loss(prediction, target).mean()",
        (
            ('F.cross_entropy(model(batch["x"]), batch["y"])', 'F.mse_loss(model(batch["x"]), batch["x"] @ W)'),
            (
                'return cross_entropy(model(batch["x"]), batch["y"]).mean()',
                f'prediction, target = model(batch["x"]), batch["x"] @ W\n    return {HOLE}',
            ),
        ),
        "W = np.eye(3, 4)\n",
    ),
    Fix(
        "no_bias_correction",
        "optax.scale_by_adam()",
        "scale_by_uncorrected_adam()",
        preceded(FORGETS_CORRECTION, optimizers(ADAM, f"optax.chain({HOLE}, optax.scale_by_learning_rate(lr))")),
    ),
    Fix(
        "nesterov",
        "optax.sgd(lr, momentum=0.9, nesterov=True)",
        "optax.sgd(lr, momentum=0.9)",
        optimizers("SGD(parameters, lr=0.01, momentum=0.9, nesterov=True)"),
    ),
    Fix(
        "lr_in_momentum",
        "optax.sgd(schedule, momentum=0.9)",
        "optax.chain(optax.scale_by_learning_rate(schedule), optax.trace(0.9))",
        preceded(SCHEDULE, optimizers(SGD)),
        COSINE,
    ),
    Fix(
        "amsgrad",
        "jaxddp.optim.adam(lr, amsgrad=True)",
        "optax.amsgrad(lr)",
        optimizers("Adam(parameters, lr=0.01, amsgrad=True)"),
    ),
    Fix(
        "dampening",
        "jaxddp.optim.sgd(lr, momentum=0.9, dampening=0.3)",
        "optax.sgd(lr, momentum=0.9)",
        optimizers("SGD(parameters, lr=0.01, momentum=0.9, dampening=0.3)"),
    ),
    Fix(
        "rmsprop_decay",
        "optax.rmsprop(lr, decay=0.99, eps_in_sqrt=False)",
        "optax.rmsprop(lr, eps_in_sqrt=False)",
        optimizers(RMSPROP),
    ),
    Fix(
        "rmsprop_centred",
        "optax.rmsprop(lr, decay=0.99, eps_in_sqrt=False, centered=True, initial_scale=0.0)",
        "optax.rmsprop(lr, decay=0.99, eps_in_sqrt=False)",
        optimizers("RMSprop(parameters, lr=0.01, centered=True)"),
    ),
    Fix(
        "adagrad_accumulator",
        "jaxddp.optim.adagrad(lr, eps=0.0, initial_accumulator_value=0)",
        "optax.adagrad(lr, eps=0.0)",
        optimizers("Adagrad(parameters, lr=0.01, eps=0.0)"),
    ),
    Fix(
        "lr_scaled",
        "the learning rate of the reference",
        "2 * lr",
        optimizers(ADAM, f"optax.adam({HOLE})"),
        sentence=True,
        right="lr",
    ),
    Fix("lr_off_by_one", "schedule(t)", "schedule(t + 1)", SCHEDULED, COSINE),
    Fix("scheduler_too_fast", "schedule(t)", "schedule(2 * t)", SCHEDULED, COSINE),
    Fix(
        "warmup_start",
        f"optax.warmup_cosine_decay_schedule({FROM})",
        f"optax.warmup_cosine_decay_schedule({FROM.replace('first_rate', '0.0')})",
        preceded(RATES, optimizers("SGD(parameters, lr=0.1)", f"optax.sgd({HOLE})")),
        WARM,
    ),
    Fix(
        "resume_lost_state",
        "jax.tree.unflatten(jax.tree.structure(optimizer.init(params)), saved)",
        "optimizer.init(params)",
        optimizers(ADAM, "optax.adam(lr)"),
        f"""
def jax_restore(state):
    import dataclasses
    optimizer, params, saved = jax_optimizer, state.params, jax.tree.leaves(state.opt_state)
    return dataclasses.replace(state, opt_state={HOLE})
restore_at = 2
""",
    ),
    Fix(
        "betas",
        "optax.adam(lr, b1=0.9, b2=0.98)",
        "optax.adam(lr)",
        optimizers("Adam(parameters, lr=0.01, betas=(0.9, 0.98))"),
    ),
)
