"""Faults between the loss and the optimizer: reduction, accumulation, clipping, replicas."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import optax
from jax import lax
from jax import numpy as jnp

from jaxddp.distributed.collectives import AXIS_NAME

from .models_flax import auxiliary, mlp_loss, token_losses, tokens_global_loss
from .planted_edits import Edit, Planted, both, model, on, optimizer, step
from .scenarios import Translation
from .steps import (
    Micro,
    Tree,
    added,
    count_labels,
    leaf_of,
    mean_of,
    named_map,
    over_all_elements,
    pmean,
    psum,
    scaled,
    torch_clip,
    total_of,
)

BEFORE_REDUCTION = ("local_loss", "local_gradients")
SAME_FACTOR = "makes N times the mean of the gradients as well"


def summed_by_shard_map(loss: Any, params: Tree, state: Any, buffers: Tree, batch: Any) -> Any:
    """Sum gradients as value_and_grad does in a shard_map with check_vma, whose parameters are replicated."""
    outputs, gradients = jax.value_and_grad(loss, has_aux=True)(params, buffers, batch)
    return outputs, psum(gradients)


def collective_in_loss(collective: Any) -> Any:
    """Differentiate the loss after a collective has summed or averaged it."""

    def differentiate(loss: Any, params: Tree, state: Any, buffers: Tree, batch: Any) -> Any:
        def of_all(params: Tree) -> tuple[jax.Array, Tree]:
            value, new_buffers = loss(params, buffers, batch)
            return collective(value, AXIS_NAME), new_buffers

        return jax.value_and_grad(of_all, has_aux=True)(params)

    return differentiate


def synchronised_before_last(micros: list[Micro]) -> tuple[jax.Array, Tree]:
    """Average all micro-batches except the last over the replicas."""
    head = pmean(total_of(micros[:-1])[1])
    return mean_of(micros)[0], scaled(added(head, micros[-1].gradients), 1 / len(micros))


def synchronised_after_first(micros: list[Micro]) -> tuple[jax.Array, Tree]:
    """Average only the first micro-batch over the replicas."""
    rest = total_of(micros[1:])[1]
    return mean_of(micros)[0], scaled(added(pmean(micros[0].gradients), rest), 1 / len(micros))


def over_own_elements(micros: list[Micro]) -> tuple[jax.Array, Tree]:
    """Average over this replica's elements."""
    loss, gradients = total_of([Micro(m.loss * m.count, scaled(m.gradients, m.count), None) for m in micros])
    count = sum(micro.count for micro in micros)
    return loss / count, scaled(gradients, 1 / count)


def summed(micros: list[Micro]) -> tuple[jax.Array, Tree]:
    """Sum over each micro-batch's elements."""
    sums = [Micro(micro.loss, scaled(micro.gradients, micro.count), None) for micro in micros]
    return mean_of(micros)[0], scaled(total_of(sums)[1], 1 / len(micros))


def rounded(dtype: Any) -> Any:
    """Average gradients over the replicas in 16 bits."""

    def reduce(gradients: Tree) -> Tree:
        narrow = pmean(jax.tree.map(lambda g: g.astype(dtype), gradients))
        return jax.tree.map(lambda g, like: g.astype(like.dtype), narrow, gradients)

    return reduce


def clip_first(gradients: Tree, local: Tree, largest: float) -> Tree:
    """Clip each replica's gradients, then average them."""
    return pmean(torch_clip(local, local, largest))


def clip_by(norm: Any) -> Any:
    """Clip the averaged gradients by another norm."""
    return lambda gradients, local, largest: scaled(
        gradients, jnp.minimum(1, largest / (norm(gradients, local) + 1e-6))
    )


def norm_reduced_twice(gradients: Tree, local: Tree) -> jax.Array:
    """Sum the squared norm over replicas that hold the same gradients, and take the root."""
    return jnp.sqrt(lax.psum(optax.tree.norm(gradients) ** 2, AXIS_NAME))


def norm_of_tied_twice(gradients: Tree, local: Tree) -> jax.Array:
    """Count the embedding's gradient twice, also as the output layer's."""
    return jnp.sqrt(optax.tree.norm(gradients) ** 2 + jnp.square(gradients["embed"]["embedding"]).sum())


def optax_clip(gradients: Tree, local: Tree, largest: float) -> Tree:
    """Clip by optax.clip_by_global_norm, which does not add 1e-6."""
    clipped, _ = optax.clip_by_global_norm(largest).update(gradients, optax.EmptyState())
    return clipped


def no_clip(gradients: Tree, local: Tree, largest: float) -> Tree:
    """Do not clip."""
    return gradients


def clip_at(factor: float) -> Any:
    """Clip by the norm as torch does, at a factor of its largest norm."""
    return lambda gradients, local, largest: torch_clip(gradients, local, factor * largest)


def by_value(gradients: Tree, local: Tree, largest: float) -> Tree:
    """Clip each element by itself."""
    return jax.tree.map(lambda g: jnp.clip(g, -0.1 * largest, 0.1 * largest), gradients)


def in_chain(clip: Any) -> Edit:
    """Clip at the start of the optax chain, by a function of the step's kind, and not in the step."""

    def edit(right: Translation) -> Translation:
        largest = right.scenario.setting.clip_grad_norm
        first = optax.stateless(lambda gradients, params: clip(gradients, gradients, largest))
        chain = replace(right.optimizer, first=(first, *right.optimizer.first))
        shows = (*BEFORE_REDUCTION, "gradients")
        return replace(right, optimizer=chain, step=replace(right.custom_step, clip_grad_norm=None, shows=shows))

    return edit


def different_start(params: Any, rank: int) -> Any:
    """Give each replica different initial weights."""
    key = jax.random.key(rank)
    return jax.tree.map(lambda p: p + rank * 0.01 * jax.random.normal(key, p.shape, p.dtype), params)


class Previous(NamedTuple):
    """Parameters at the last update."""

    params: Tree


def remember() -> optax.GradientTransformation:
    """Keep the parameters for the next step."""
    return optax.GradientTransformation(Previous, lambda updates, state, params: (updates, Previous(params)))


def at_previous(loss: Any, params: Tree, state: Any, buffers: Tree, batch: Any) -> Any:
    """Return loss and gradients at the parameters of the previous step."""
    return jax.value_and_grad(loss, has_aux=True)(state.opt_state[-1].params, buffers, batch)


def aliased(one: str, other: str) -> Any:
    """Replace a tensor by another."""
    return lambda old, new: named_map(lambda name, leaf: leaf_of(new, other) if name == one else leaf, new)


def gradient_aliased(one: str, other: str) -> Any:
    """Replace a tensor's gradient by another's."""
    return lambda gradients: aliased(one, other)(None, pmean(gradients))


def overwritten(batch: Any, at: int, rank: int) -> Any:
    """Overwrite the host's array with the next inputs before the transfer."""
    return {**batch(at, rank), "x": batch(at + 1, rank)["x"]}


def loss_is(function: Any) -> Edit:
    """Replace the loss of the jax module."""
    return lambda right: replace(right, loss=function)


def own_mean(jax_model: Any, batch: Any) -> jax.Array:
    """Return a mean where the reference returns losses and weights."""
    values, weights = tokens_global_loss(jax_model, batch)
    return values.sum() / weights.sum()


def own_mean_and_auxiliary(jax_model: Any, batch: Any) -> jax.Array:
    """Average the labels of this micro-batch, although the batch has the number of labels of the whole step."""
    logits = jax_model(batch["x"])
    values, counts = token_losses(logits, batch["y"])
    return values.sum() / counts.sum() + auxiliary(logits)


def everything_scaled(jax_model: Any, batch: Any) -> jax.Array:
    """Scale the auxiliary loss by the factor of the labels' loss."""
    logits = jax_model(batch["x"])
    values, _ = token_losses(logits, batch["y"])
    return (values.sum() / batch["items"][0] + auxiliary(logits)) * batch["parts"][0]


EVERYWHERE = on("mlp") + on("convnet") + on("tokens", world_size=4)
ACCUMULATED = on("mlp_accumulated") + on("convnet_accumulated")
CLIPPED = (*on("mlp"), *on("convnet_accumulated"), *on("tokens"))

PLANTED: dict[str, Planted] = {
    "sum_not_mean": Planted(
        step(reduce=psum), EVERYWHERE, "gradients", {"check_vma": SAME_FACTOR, "local_device_count": SAME_FACTOR}
    ),
    "check_vma": Planted(
        step(differentiate=summed_by_shard_map), EVERYWHERE, "local_gradients", {"sum_not_mean": SAME_FACTOR}
    ),
    "check_vma/psum": Planted(step(differentiate=summed_by_shard_map, reduce=psum), EVERYWHERE, "local_gradients"),
    "collective_in_loss": Planted(
        step(differentiate=collective_in_loss(lax.psum), shows=("local_gradients", "gradients", "clipped_gradients")),
        EVERYWHERE,
        "local_gradients",
        {"sum_not_mean": SAME_FACTOR, "check_vma": SAME_FACTOR},
    ),
    "collective_in_loss/pmean": Planted(
        step(differentiate=collective_in_loss(lax.pmean), reduce=lambda g: g, shows=("gradients", "clipped_gradients")),
        EVERYWHERE,
        "gradients",
        {"no_sync": "the gradient of the mean loss is the local one, not averaged"},
    ),
    "no_sync": Planted(
        step(reduce=lambda g: g),
        EVERYWHERE,
        "gradients",
        {"collective_in_loss": "the gradient of a pmean of the loss is the local one, not averaged"},
    ),
    "averaged_twice": Planted(
        step(reduce=lambda g: scaled(pmean(g), 1 / lax.axis_size(AXIS_NAME))), EVERYWHERE, "gradients"
    ),
    "local_device_count": Planted(
        step(reduce=lambda g: scaled(psum(g), 2 / lax.axis_size(AXIS_NAME))),  # of two hosts
        on("mlp_accumulated", world_size=4),
        "gradients",
    ),
    "accumulation_not_divided": Planted(
        step(combine=lambda micros: (mean_of(micros)[0], total_of(micros)[1])), ACCUMULATED, "local_gradients"
    ),
    "synchronised_early": Planted(
        step(combine=synchronised_before_last, reduce=lambda g: g, shows=("local_loss", "gradients")),
        ACCUMULATED,
        "gradients",
    ),
    "synchronised_early/first": Planted(
        step(combine=synchronised_after_first, reduce=lambda g: g, shows=("local_loss", "gradients")),
        ACCUMULATED,
        "gradients",
    ),
    "mean_per_micro_batch": Planted(step(combine=mean_of), on("tokens_global"), "local_loss"),
    "mean_per_micro_batch/loss": Planted(
        loss_is(own_mean), on("tokens_global") + on("tokens_global", world_size=4), "local_loss"
    ),
    "mean_per_micro_batch/sum": Planted(loss_is(own_mean_and_auxiliary), on("tokens_sum"), "local_loss"),
    "mean_per_rank": Planted(
        step(combine=over_own_elements), on("tokens_global") + on("tokens_global", world_size=4), "local_loss"
    ),
    "global_mean": Planted(
        step(count=count_labels, combine=over_all_elements),
        on("tokens_weighted") + on("tokens_weighted", world_size=4),
        "local_loss",
    ),
    "loss_scale/reduced": Planted(step(reduce=lambda g: scaled(pmean(g), 0.9)), CLIPPED, "gradients"),
    "loss_scale/summed": Planted(step(count=count_labels, combine=summed), on("tokens_weighted"), "local_gradients"),
    "auxiliary_loss_scaled": Planted(loss_is(everything_scaled), on("tokens_sum"), "local_loss"),
    # The penalty of a loss whose port leaves the decay to the optimizer.
    "auxiliary_loss_scaled/forgotten": Planted(loss_is(mlp_loss), on("mlp_penalty"), "local_loss"),
    "clipped_before_mean": Planted(
        step(clip=clip_first, shows=(*BEFORE_REDUCTION, "clipped_gradients")), CLIPPED, "clipped_gradients"
    ),
    "clip_norm_local": Planted(step(clip=clip_by(norm_reduced_twice)), CLIPPED, "clipped_gradients"),
    "clip_norm_local/own": Planted(
        step(clip=clip_by(lambda gradients, local: optax.tree.norm(local))), CLIPPED, "clipped_gradients"
    ),
    "clip_missing": Planted(step(clip=no_clip), CLIPPED, "clipped_gradients"),
    "clip_missing/chain": Planted(in_chain(no_clip), CLIPPED, "update"),
    "clip_norm": Planted(step(clip=clip_at(0.5)), CLIPPED, "clipped_gradients"),
    "clip_norm/chain": Planted(in_chain(clip_at(0.5)), CLIPPED, "update"),
    "clip_norm/always": Planted(in_chain(clip_at(0.01)), CLIPPED, "update"),
    "clip_by_value": Planted(step(clip=by_value), CLIPPED, "clipped_gradients"),
    "clip_by_value/chain": Planted(in_chain(by_value), CLIPPED, "update"),
    "clip_epsilon": Planted(step(clip=optax_clip), CLIPPED, "clipped_gradients"),
    "clip_epsilon/chain": Planted(in_chain(optax_clip), CLIPPED, "update"),
    "compressed_all_reduce": Planted(step(reduce=rounded(jnp.bfloat16)), EVERYWHERE, "gradients"),
    "compressed_all_reduce/float16": Planted(step(reduce=rounded(jnp.float16)), EVERYWHERE, "gradients"),
    "different_start": Planted(lambda right: replace(right, start=different_start), EVERYWHERE, "params"),
    "buffers_local": Planted(step(share=lambda buffers: buffers), on("convnet") + ACCUMULATED[2:], "buffers"),
    "buffers_averaged": Planted(step(share=pmean), on("convnet") + ACCUMULATED[2:], "buffers"),
    "stale_parameters": Planted(
        both(optimizer(last=(remember(),)), step(differentiate=at_previous)), EVERYWHERE, "local_loss"
    ),
    "unused_parameters": Planted(
        optimizer(skips_unused=False), on("tokens_unused", "sgd", "sgd_plain", "adam", "adamw", "rmsprop"), "update"
    ),
    "aliased_buffers": Planted(step(finish=aliased("fc2.bias", "fc1.bias")), on("mlp"), "update"),
    "aliased_buffers/gradient": Planted(step(reduce=gradient_aliased("fc1.bias", "fc2.bias")), on("mlp"), "gradients"),
    "aliased_buffers/host": Planted(
        lambda right: replace(right, reread=overwritten), on("mlp") + on("convnet"), "samples"
    ),
    "tied_weights": Planted(model(tied=False), on("tokens") + on("tokens_global"), "local_gradients"),
    "tied_weights/output": Planted(model(output=lax.stop_gradient), on("tokens"), "local_gradients"),
    "tied_weights/look_up": Planted(
        model(look_up=lambda table, x: lax.stop_gradient(table)[x]), on("tokens"), "local_gradients"
    ),
    "tied_weights/norm": Planted(step(clip=clip_by(norm_of_tied_twice)), on("tokens"), "clipped_gradients"),
}
