"""A hand-written replica step, in pieces that can each be wrong."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import optax
from jax import lax
from jax import numpy as jnp

from jaxddp.distributed.collectives import AXIS_NAME
from jaxddp.state import TrainState

from .models_torch import IGNORED

Tree = Any
Batch = Mapping[str, jax.Array]
ALL = ("local_loss", "local_gradients", "gradients", "clipped_gradients")


def count_labels(batch: Batch) -> jax.Array:
    """Count the labels of a micro-batch that are not ignored."""
    return (batch["y"] != IGNORED).sum()


def pmean(tree: Tree) -> Tree:
    """Average over the replicas."""
    return lax.pmean(tree, AXIS_NAME)


def psum(tree: Tree) -> Tree:
    """Sum over the replicas."""
    return lax.psum(tree, AXIS_NAME)


def scaled(tree: Tree, factor: Any) -> Tree:
    """Multiply each leaf by a number."""
    return jax.tree.map(lambda leaf: leaf * factor, tree)


def added(tree: Tree, other: Tree) -> Tree:
    """Add two trees leaf by leaf."""
    return jax.tree.map(jnp.add, tree, other)


def from_rank0(tree: Tree) -> Tree:
    """Return replica 0's value of each leaf."""
    return jax.tree.map(lambda leaf: lax.all_gather(leaf, AXIS_NAME)[0], tree)


def named_map(function: Callable[[str, Any], Any], tree: Tree) -> Tree:
    """Map (name, leaf) over a tree; names are as "fc1.kernel"."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: function(".".join(str(key.key) for key in path), leaf), tree
    )


def leaf_of(tree: Tree, name: str) -> Any:
    """Return a leaf by its name."""
    for key in name.split("."):
        tree = tree[key]
    return tree


def torch_clip(gradients: Tree, local: Tree, largest: float) -> Tree:
    """Clip the averaged gradients as torch.nn.utils.clip_grad_norm_ does."""
    return scaled(gradients, jnp.minimum(1, largest / (optax.tree.norm(gradients) + 1e-6)))


@dataclass(frozen=True)
class Micro:
    """Results of one micro-batch: mean loss, gradients of the mean, and number of elements in the mean."""

    loss: jax.Array
    gradients: Tree
    count: Any


def mean_of(micros: list[Micro]) -> tuple[jax.Array, Tree]:
    """Average over the micro-batches."""
    loss, gradients = total_of(micros)
    return loss / len(micros), scaled(gradients, 1 / len(micros))


def total_of(micros: list[Micro]) -> tuple[jax.Array, Tree]:
    """Sum over the micro-batches."""
    loss, gradients = micros[0].loss, micros[0].gradients
    for micro in micros[1:]:
        loss, gradients = loss + micro.loss, added(gradients, micro.gradients)
    return loss, gradients


def over_all_elements(micros: list[Micro]) -> tuple[jax.Array, Tree]:
    """Divide sums over elements by the mean number of elements per replica; the mean over replicas is then global."""
    loss, gradients = total_of([Micro(m.loss * m.count, scaled(m.gradients, m.count), None) for m in micros])
    count = pmean(sum(m.count for m in micros))
    return loss / count, scaled(gradients, 1 / count)


@dataclass(frozen=True)
class Step:
    """A port's `jax_step`; the defaults are correct for `accumulation_steps` and "ddp".

    Attributes:
        accumulation_steps: micro-batches per batch.
        clip_grad_norm: largest norm; None: no clipping.
        count: batch -> number of elements that its loss is a mean over.
        differentiate: (loss, params, state, buffers, batch) -> ((loss, buffers), gradients).
        combine: micro-batches -> this replica's loss and gradients.
        reduce: this replica's gradients -> those of all replicas.
        clip: (gradients, this replica's gradients, largest norm) -> clipped gradients.
        share: buffers -> buffers to keep.
        finish: (old parameters, new parameters) -> parameters to return.
        shows: stages to return.
    """

    accumulation_steps: int = 1
    clip_grad_norm: float | None = None
    count: Callable[[Batch], Any] = lambda batch: 1
    differentiate: Callable[..., Any] = lambda loss, params, state, buffers, batch: jax.value_and_grad(
        loss, has_aux=True
    )(params, buffers, batch)
    combine: Callable[[list[Micro]], tuple[jax.Array, Tree]] = mean_of
    reduce: Callable[[Tree], Tree] = pmean
    clip: Callable[[Tree, Tree, float], Tree] = torch_clip
    share: Callable[[Tree], Tree] = from_rank0
    finish: Callable[[Tree, Tree], Tree] = lambda old, new: new
    shows: tuple[str, ...] = field(default=ALL)

    def __call__(self, loss: Any, optimizer: Any, state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
        """Make one optimizer step of one replica."""
        micros, buffers = [], state.buffers
        for number in range(self.accumulation_steps):
            part = batch if self.accumulation_steps == 1 else {name: array[number] for name, array in batch.items()}
            (value, buffers), gradients = self.differentiate(loss, state.params, state, buffers, part)
            micros.append(Micro(value, gradients, self.count(part)))
        value, local = self.combine(micros)
        gradients = self.reduce(local)
        clipped = gradients if self.clip_grad_norm is None else self.clip(gradients, local, self.clip_grad_norm)
        updates, opt_state = optimizer.update(clipped, state.opt_state, state.params)
        params = self.finish(state.params, optax.apply_updates(state.params, updates))
        stages = {"local_loss": value, "local_gradients": local, "gradients": gradients, "clipped_gradients": clipped}
        state = TrainState(state.step + 1, params, self.share(buffers), opt_state)
        return state, {name: stages[name] for name in self.shows}
