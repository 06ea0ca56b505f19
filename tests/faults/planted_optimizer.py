"""Faults of the optimizer, built from optax's parts, and of its restored state."""

from dataclasses import replace
from typing import Any

import jax
import optax
from jax import numpy as jnp

from .planted_edits import Edit, Planted, on, optimizer, recipe
from .recipes import FALL, FIRST, LONG, RISE, Recipe, direction, is_matrix
from .scenarios import Translation
from .steps import Tree, named_map

RESTORED_AT = 4
SCALE = 1024.0
PERIOD = 3  # steps between resets


def undecayed(rule: Recipe) -> optax.GradientTransformation:
    """Leave out the decay at its place in the chain."""
    return optax.identity()


def without_every_third() -> optax.GradientTransformation:
    """Move no parameter at every third step."""

    def update(updates: Tree, count: jax.Array, params: Any = None) -> tuple[Tree, jax.Array]:
        is_made = (count + 1) % 3 != 0
        return jax.tree.map(lambda u: jnp.where(is_made, u, 0.0), updates), count + 1

    return optax.GradientTransformation(lambda params: jnp.int32(0), update)


def decay_all_but(*layers: str, bias: bool = True) -> Edit:
    """Decay all tensors but those whose names start so, and, without `bias`, the other layers' biases."""

    def decays(name: str) -> bool:
        return not name.startswith(layers) and (bias or name.startswith("norm") or not name.endswith("bias"))

    def mask(params: Tree) -> Tree:
        return named_map(lambda name, _: decays(name), params)

    return optimizer(decay=lambda rule: optax.add_decayed_weights(rule.decay, mask))


def decay_in_float32(right: Translation) -> Translation:
    """Apply the decay as a float32 factor on the parameters, 1 - lr decay."""
    rule = right.optimizer.recipe

    def update(updates: Tree, count: jax.Array, params: Tree) -> tuple[Tree, jax.Array]:
        factor = 1 - jnp.float32(rule.schedule(count)) * jnp.float32(rule.decay)
        return jax.tree.map(lambda u, p: u + (factor.astype(p.dtype) * p - p), updates, params), count + 1

    shrink = optax.GradientTransformation(lambda params: jnp.int32(0), update)
    return replace(right, optimizer=replace(right.optimizer, decay=undecayed, last=(shrink,)))


def eps_in_root(rule: Recipe) -> optax.GradientTransformation:
    """Return optax's transformation, which has eps under the root."""
    if rule.kind == "rmsprop":
        return optax.scale_by_rms(rule.alpha, rule.eps)
    if rule.kind == "adagrad":
        return optax.scale_by_rss(rule.initial, rule.eps)
    return optax.scale_by_adam(*rule.betas, eps=0.0, eps_root=rule.eps)


def uncorrected_adam(rule: Recipe) -> optax.GradientTransformation:
    """Return Adam without bias correction, the division by 1 - beta^t."""
    first, second = rule.betas

    def update(gradients: Tree, state: tuple[Tree, Tree], params: Tree) -> tuple[Tree, tuple[Tree, Tree]]:
        mean = jax.tree.map(lambda m, g: first * m + (1 - first) * g, state[0], gradients)
        square = jax.tree.map(lambda v, g: second * v + (1 - second) * g * g, state[1], gradients)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + rule.eps), mean, square), (mean, square)

    def init(params: Tree) -> tuple[Tree, Tree]:
        return jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)

    return optax.GradientTransformation(init, update)


def largest_squares(rule: Recipe) -> optax.GradientTransformation:
    """Return optax's AMSGrad."""
    return optax.scale_by_amsgrad(*rule.betas, eps=rule.eps)


def momentum_of_updates(right: Translation) -> Translation:
    """Apply the rate before the momentum."""
    rule = right.optimizer.recipe
    return optimizer(direction=lambda _: optax.identity(), last=(optax.trace(rule.momentum, rule.nesterov),))(right)


def centred(rule: Recipe) -> optax.GradientTransformation:
    """Return RMSprop that divides by the standard deviation."""
    return optax.scale_by_stddev(rule.alpha, rule.eps, eps_in_sqrt=False)


def squares_from_one(rule: Recipe) -> optax.GradientTransformation:
    """Return RMSprop as in TensorFlow 1, whose mean of squares starts at 1."""
    return optax.scale_by_rms(rule.alpha, rule.eps, initial_scale=1.0, eps_in_sqrt=False)


def reset_every(steps: int, inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Reset momentum and moments every so many steps."""

    def update(gradients: Tree, state: tuple[Any, Any], params: Tree) -> tuple[Tree, Any]:
        count, kept = state
        kept = jax.tree.map(lambda new, old: jnp.where(count % steps == 0, new, old), inner.init(params), kept)
        updates, kept = inner.update(gradients, kept, params)
        return updates, (count + 1, kept)

    return optax.GradientTransformation(lambda params: (jnp.int32(0), inner.init(params)), update)


def slower_below(updates: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
    """Use a smaller rate for the first layer."""
    return named_map(lambda name, u: u * (0.8 if name.startswith("fc1") else 1.0), updates), state


SLOWER_BELOW = optax.GradientTransformation(lambda params: optax.EmptyState(), slower_below)


def optax_trace(nesterov: bool) -> Any:
    """Return optax's momentum."""
    return lambda rule: optax.trace(rule.momentum, nesterov)


def rate(change: Any) -> Edit:
    """Replace the schedule by (recipe, count) -> rate."""
    return optimizer(schedule=change)


def rate_times(factor_of: Any) -> Edit:
    """Multiply the rate by a function of the world size."""

    def edit(right: Translation) -> Translation:
        factor = factor_of(right.scenario.world_size)
        return rate(lambda rule, count: factor * rule.schedule(count))(right)

    return edit


def warm_cosine(first: float = FIRST, later: int = 0) -> Edit:
    """Start the warm-up at another share of the highest rate, and end it, and the cosine, some steps later."""
    rise = RISE + later
    return rate(
        lambda rule, count: optax.warmup_cosine_decay_schedule(first * rule.lr, rule.lr, rise, rise + FALL)(count)
    )


def stepped_by_every_replica(right: Translation) -> Translation:
    """Advance the schedule by the number of replicas in every step."""
    replicas = right.scenario.world_size
    return rate(lambda rule, count: rule.schedule(replicas * count))(right)


def restored(change: Any) -> Edit:
    """Replace the loaded optimizer state by (optimizer, state) -> optimizer state."""
    return lambda right: replace(
        right, restore=lambda chain, state: replace(state, opt_state=change(chain, state)), restore_at=RESTORED_AT
    )


def of_kind(state: Any, kind: Any, change: Any) -> Any:
    """Change the leaves of one kind of dtype in the optimizer state."""
    return jax.tree.map(lambda leaf: change(leaf) if jnp.issubdtype(leaf.dtype, kind) else leaf, state.opt_state)


GROUPS = on("mlp_groups", "sgd", "adam", "adamw") + on("tokens_groups")
TOKENS = on("tokens") + on("tokens_groups")  # the reference decays all tensors, or matrices only
DECAYED = on("mlp", "sgd", "sgd_plain", "adam", "adamw", "rmsprop", "adagrad") + on("tokens")
ADAPTIVE = on("mlp", "adam", "adamw", "rmsprop", "adagrad") + on("convnet", "adamw")
ADAM = on("mlp", "adam", "adamw") + on("tokens", "adamw")
ALL = on("mlp", "sgd", "adam", "adamw", "rmsprop", "adagrad") + on("convnet")
WARM = on("mlp_warm_cosine", "sgd", "adam", "adamw")
ALL_4 = on("mlp", world_size=4) + on("tokens", world_size=4)

FAULTS: dict[str, tuple[Any, ...]] = {
    "coupled_decay": (optimizer(coupled=True), on("mlp", "adamw") + on("convnet", "adamw")),
    "coupled_decay/decoupled": (
        optimizer(coupled=False),
        on("mlp", "sgd", "sgd_nesterov", "adam", "rmsprop", "adagrad"),
    ),
    "decay_value": (recipe(decay=1e-4), DECAYED),
    "decay_value/none": (optimizer(decay=undecayed), DECAYED),
    # Rows of the embedding that are not read have a gradient of 0, to which Adam adds the decay alone.
    "decay_value/unread_rows": (optimizer(decay=undecayed), on("tokens", "adam")),
    "decay_value/larger": (recipe(decay=0.05), DECAYED),
    "decay_without_lr": (optimizer(after_rate=True), DECAYED),
    "optimizer_option": (recipe(options={"momentum_decay": 0.01}), on("mlp", "nadam")),
    "optimizer_option/rho": (recipe(options={"rho": 0.95}), on("mlp", "adadelta")),
    "optax_rule": (optimizer(direction=lambda rule: optax.scale_by_adam(nesterov=True)), on("mlp", "nadam")),
    "optax_rule/radam": (optimizer(direction=lambda rule: optax.scale_by_radam(b2=0.99)), on("mlp", "radam")),
    "state_reset": (optimizer(direction=lambda rule: reset_every(PERIOD, direction(rule))), on("mlp")),
    "rate_of_some": (optimizer(last=(SLOWER_BELOW,)), on("mlp")),
    "decay_mask": (optimizer(decay=lambda rule: optax.add_decayed_weights(rule.decay)), GROUPS),
    "decay_mask/matrices": (optimizer(decay=lambda rule: optax.add_decayed_weights(rule.decay, is_matrix)), DECAYED),
    "decay_mask/norms": (decay_all_but("norm"), TOKENS),
    "decay_mask/biases": (decay_all_but(bias=False), TOKENS),
    "decay_mask/embedding": (decay_all_but("embed"), TOKENS),
    "decay_mask/norms_and_embedding": (decay_all_but("norm", "embed", bias=False), TOKENS),
    "decay_rounded_away": (decay_in_float32, on("mlp", "sgd_plain", "adamw")),
    "decay_rounded_away/lost": (
        decay_in_float32,
        on("mlp", "adamw_tiny_decay"),
        {"decay_value": "1 - lr decay is 1 in float32: no decay at all"},
    ),
    "eps_in_root": (optimizer(direction=eps_in_root), ADAPTIVE),
    "eps_value": (recipe(eps=1e-7), ADAPTIVE),
    "eps_value/larger": (recipe(eps=1e-3), ADAPTIVE),
    "loss_scale": (optimizer(first=(optax.scale(SCALE),)), on("mlp", "adamw") + on("convnet", "adamw")),
    "loss_scale/coupled": (optimizer(first=(optax.scale(SCALE),)), on("mlp", "adam", "rmsprop", "adagrad")),
    "no_bias_correction": (optimizer(direction=uncorrected_adam), ADAM),
    "lr_in_momentum": (momentum_of_updates, on("mlp", "sgd") + on("convnet", "sgd")),
    "updates_skipped": (optimizer(last=(without_every_third(),)), ADAM),
    "gradients_applied": (optimizer(direction=lambda rule: optax.identity(), decay=undecayed), ADAM),
    "amsgrad": (optimizer(direction=largest_squares), ADAM),
    "nesterov": (optimizer(direction=optax_trace(True)), on("mlp", "sgd") + on("convnet", "sgd")),
    "nesterov/missing": (optimizer(direction=optax_trace(False)), on("mlp", "sgd_nesterov")),
    "dampening": (optimizer(direction=optax_trace(False)), on("mlp", "sgd_dampening")),
    "dampening/added": (recipe(dampening=0.5), on("mlp", "sgd") + on("tokens", "sgd")),
    "rmsprop_decay": (recipe(alpha=0.9), on("mlp", "rmsprop") + on("mlp", "rmsprop_centred")),
    "rmsprop_centred": (optimizer(direction=centred), on("mlp", "rmsprop")),
    "rmsprop_centred/missing": (recipe(centred=False), on("mlp", "rmsprop_centred")),
    "rmsprop_centred/initial": (optimizer(direction=squares_from_one), on("mlp", "rmsprop")),
    "adagrad_accumulator": (recipe(initial=0.1), on("mlp", "adagrad") + on("tokens", "adagrad")),
    "lr_scaled": (rate_times(lambda replicas: replicas), ALL + ALL_4),
    "lr_scaled/root": (rate_times(lambda replicas: replicas**0.5), ALL + ALL_4),
    "lr_off_by_one": (rate(lambda rule, count: rule.schedule(count + 1)), ALL),
    "lr_off_by_one/behind": (rate(lambda rule, count: rule.schedule(jnp.maximum(count - 1, 0))), ALL),
    "warmup_start": (warm_cosine(first=0.0), WARM),
    "warmup_start/small": (warm_cosine(first=0.001), WARM),
    "warmup_start/later": (warm_cosine(later=1), WARM),
    "warmup_start/earlier_from_0": (warm_cosine(first=0.0, later=-1), WARM),
    "warmup_start/line": (
        rate(lambda rule, count: optax.linear_schedule(0.0, rule.lr, RISE)(count)),
        on("mlp_warm_line"),
    ),
    "warmup_start/none": (rate(lambda rule, count: optax.cosine_decay_schedule(rule.lr, FALL)(count)), WARM),
    "warmup_start/long": (rate(lambda rule, count: rule.lr * count / LONG), on("mlp_warm_long")),
    "scheduler_too_fast": (stepped_by_every_replica, ALL + ALL_4),
    "resume_lost_state": (restored(lambda chain, state: chain.init(state.params)), ALL),
    "resume_lost_state/count": (restored(lambda chain, state: of_kind(state, jnp.integer, jnp.zeros_like)), ALL),
    "resume_lost_state/moments": (restored(lambda chain, state: of_kind(state, jnp.floating, jnp.zeros_like)), ALL),
    "betas": (recipe(betas=(0.8, 0.99)), ADAM),
    "betas/second": (recipe(betas=(0.9, 0.98)), ADAM),
    "betas/momentum": (recipe(momentum=0.8), on("mlp", "sgd", "sgd_nesterov", "sgd_dampening")),
}
PLANTED = {label: Planted(edit, scenarios, "update", *also) for label, (edit, scenarios, *also) in FAULTS.items()}
