"""Faults between the loss and the optimizer: reduction, accumulation, clipping, replicas."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import optax
from jax import lax
from jax import numpy as jnp

from jaxddp.distributed.collectives import AXIS_NAME

from .models_flax import auxiliary, token_losses, tokens_global_loss
from .models_torch import IGNORED
from .planted_edits import Edit, Planted, both, model, on, optimizer, step
from .scenarios import Translation
from .steps import Micro, Tree, added, mean_of, over_all_elements, pmean, psum, scaled, torch_clip, total_of

BEFORE_REDUCTION = ("local_loss", "local_gradients")
SAME_FACTOR = "makes N times the mean of the gradients as well"


def summed_by_shard_map(loss: Any, params: Tree, state: Any, buffers: Tree, batch: Any) -> Any:
    """What value_and_grad gives in a shard_map with check_vma: replicated parameters' gradients come summed."""
    found, gradients = jax.value_and_grad(loss, has_aux=True)(params, buffers, batch)
    return found, psum(gradients)


def collective_in_loss(collective: Any) -> Any:
    """The gradient of the summed or averaged loss."""

    def differentiate(loss: Any, params: Tree, state: Any, buffers: Tree, batch: Any) -> Any:
        def of_all(params: Tree) -> tuple[jax.Array, Tree]:
            value, new_buffers = loss(params, buffers, batch)
            return collective(value, AXIS_NAME), new_buffers

        return jax.value_and_grad(of_all, has_aux=True)(params)

    return differentiate


def per_host(gradients: Tree) -> Tree:
    """The sum over all replicas, divided by the devices of one host, of which there are two."""
    return scaled(psum(gradients), 2 / lax.axis_size(AXIS_NAME))


def summed_gradients(micros: list[Micro]) -> tuple[jax.Array, Tree]:
    """The mean loss, and gradients that nobody divided."""
    return mean_of(micros)[0], total_of(micros)[1]


def synchronised_before_last(micros: list[Micro]) -> tuple[jax.Array, Tree]:
    """All micro-batches but the last are averaged over the replicas."""
    head = pmean(total_of(micros[:-1])[1])
    return mean_of(micros)[0], scaled(added(head, micros[-1].gradients), 1 / len(micros))


def synchronised_after_first(micros: list[Micro]) -> tuple[jax.Array, Tree]:
    """Only the first micro-batch is averaged over the replicas."""
    rest = total_of(micros[1:])[1]
    return mean_of(micros)[0], scaled(added(pmean(micros[0].gradients), rest), 1 / len(micros))


def labels_of(batch: Any) -> jax.Array:
    """Labels of a micro-batch that count."""
    return (batch["y"] != IGNORED).sum()


def over_own_elements(micros: list[Micro]) -> tuple[jax.Array, Tree]:
    """The mean over one replica's elements."""
    loss, gradients = total_of([Micro(m.loss * m.count, scaled(m.gradients, m.count), None) for m in micros])
    count = sum(micro.count for micro in micros)
    return loss / count, scaled(gradients, 1 / count)


def rounded(dtype: Any) -> Any:
    """The mean over the replicas of gradients in 16 bits."""

    def reduce(gradients: Tree) -> Tree:
        narrow = pmean(jax.tree.map(lambda g: g.astype(dtype), gradients))
        return jax.tree.map(lambda g, like: g.astype(like.dtype), narrow, gradients)

    return reduce


def clip_first(gradients: Tree, local: Tree, largest: float) -> Tree:
    """The mean of each replica's clipped gradients."""
    return pmean(torch_clip(local, local, largest))


def clip_by(norm: Any) -> Any:
    """Scale the averaged gradients by another norm than theirs."""
    return lambda gradients, local, largest: scaled(
        gradients, jnp.minimum(1, largest / (norm(gradients, local) + 1e-6))
    )


def norm_reduced_twice(gradients: Tree, local: Tree) -> jax.Array:
    """The root of the squares summed over replicas that hold the same gradients."""
    return jnp.sqrt(lax.psum(optax.tree.norm(gradients) ** 2, AXIS_NAME))


def norm_of_tied_twice(gradients: Tree, local: Tree) -> jax.Array:
    """The embedding's gradient counts as the output layer's too."""
    return jnp.sqrt(optax.tree.norm(gradients) ** 2 + jnp.square(gradients["embed.embedding"]).sum())


def optax_clip(gradients: Tree, local: Tree, largest: float) -> Tree:
    """optax.clip_by_global_norm, which has no 1e-6."""
    clipped, _ = optax.clip_by_global_norm(largest).update(gradients, optax.EmptyState())
    return clipped


def clip_in_chain(right: Translation) -> Translation:
    """A step without clipping, and an optax chain that begins with it."""
    largest = right.scenario.setting.clip_grad_norm
    chain = replace(right.optimizer, first=(optax.clip_by_global_norm(largest), *right.optimizer.first))
    shows = (*BEFORE_REDUCTION, "gradients")
    return replace(right, optimizer=chain, step=replace(right.own_step, clip_grad_norm=None, shows=shows))


def no_clip_in_chain(right: Translation) -> Translation:
    """A step without clipping, and an optax chain that forgets it."""
    return replace(right, step=replace(right.own_step, clip_grad_norm=None, shows=(*BEFORE_REDUCTION, "gradients")))


def different_start(params: Any, rank: int) -> Any:
    """Each replica draws its own initial weights."""
    key = jax.random.key(rank)
    return {name: p + rank * 0.01 * jax.random.normal(key, p.shape, p.dtype) for name, p in params.items()}


class Previous(NamedTuple):
    """The parameters that the last update was given."""

    params: Tree


def remember() -> optax.GradientTransformation:
    """Keep the parameters for the next step."""
    return optax.GradientTransformation(Previous, lambda updates, state, params: (updates, Previous(params)))


def at_previous(loss: Any, params: Tree, state: Any, buffers: Tree, batch: Any) -> Any:
    """Loss and gradients at the parameters of the step before."""
    return jax.value_and_grad(loss, has_aux=True)(state.opt_state[-1].params, buffers, batch)


def aliased(one: str, other: str) -> Any:
    """A tensor becomes what another is."""
    return lambda old, new: {**new, one: new[other]}


def gradient_aliased(one: str, other: str) -> Any:
    """A tensor gets another's gradient."""

    def reduce(gradients: Tree) -> Tree:
        averaged = pmean(gradients)
        return {**averaged, one: averaged[other]}

    return reduce


def overwritten(batch: Any, at: int, rank: int) -> Any:
    """The host's array is filled with the next inputs before they have left."""
    return {**batch(at, rank), "x": batch(at + 1, rank)["x"]}


def loss_is(function: Any) -> Edit:
    """Another loss of the flax module."""
    return lambda right: replace(right, loss=function)


def own_mean(flax_model: Any, batch: Any) -> jax.Array:
    """A scalar where the reference has losses and weights."""
    values, weights = tokens_global_loss(flax_model, batch)
    return values.sum() / weights.sum()


def own_mean_and_auxiliary(flax_model: Any, batch: Any) -> jax.Array:
    """The labels' mean over this micro-batch, although the batch says how many the whole step has."""
    logits = flax_model(batch["x"])
    values, counts = token_losses(logits, batch["y"])
    return values.sum() / counts.sum() + auxiliary(logits)


def everything_scaled(flax_model: Any, batch: Any) -> jax.Array:
    """The factor of the labels' loss on both terms."""
    logits = flax_model(batch["x"])
    values, _ = token_losses(logits, batch["y"])
    return (values.sum() / batch["items"][0] + auxiliary(logits)) * batch["parts"][0]


def stop_output(table: jax.Array) -> jax.Array:
    """The table without a gradient from the output layer."""
    return lax.stop_gradient(table)


def stop_look_up(table: jax.Array, x: jax.Array) -> jax.Array:
    """Rows without a gradient."""
    return lax.stop_gradient(table)[x]


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
    "local_device_count": Planted(step(reduce=per_host), on("mlp_accumulated", world_size=4), "gradients"),
    "accumulation_not_divided": Planted(step(combine=summed_gradients), ACCUMULATED, "local_gradients"),
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
        step(combine=over_own_elements),
        on("tokens_global") + on("tokens_global", world_size=4),
        "local_loss",
    ),
    "global_mean": Planted(
        step(count=labels_of, combine=over_all_elements),
        on("tokens_weighted") + on("tokens_weighted", world_size=4),
        "local_loss",
    ),
    "auxiliary_loss_scaled": Planted(loss_is(everything_scaled), on("tokens_sum"), "local_loss"),
    "clipped_before_mean": Planted(
        step(clip=clip_first, shows=(*BEFORE_REDUCTION, "clipped_gradients")), CLIPPED, "clipped_gradients"
    ),
    "clip_norm_local": Planted(step(clip=clip_by(norm_reduced_twice)), CLIPPED, "clipped_gradients"),
    "clip_norm_local/own": Planted(
        step(clip=clip_by(lambda gradients, local: optax.tree.norm(local))), CLIPPED, "clipped_gradients"
    ),
    "clip_missing": Planted(step(clip=lambda gradients, local, largest: gradients), CLIPPED, "clipped_gradients"),
    "clip_missing/chain": Planted(no_clip_in_chain, CLIPPED, "update"),
    "clip_epsilon": Planted(step(clip=optax_clip), CLIPPED, "clipped_gradients"),
    "clip_epsilon/chain": Planted(clip_in_chain, CLIPPED, "update"),
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
    "tied_weights/output": Planted(model(output=stop_output), on("tokens"), "local_gradients"),
    "tied_weights/look_up": Planted(model(look_up=stop_look_up), on("tokens"), "local_gradients"),
    "tied_weights/norm": Planted(step(clip=clip_by(norm_of_tied_twice)), on("tokens"), "clipped_gradients"),
}
