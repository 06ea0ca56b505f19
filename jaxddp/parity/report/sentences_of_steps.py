"""Sentences of faults of a step before its optimizer: samples, reduction, clipping; and of recordings and runs."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxddp.errors import listed
from jaxddp.parity.catalogue.optimizer import COUNTED

Names = tuple[str, ...]
MOST_LISTED = 4  # tensors whose gradients are not averaged
SUMMED = "every replica's local gradient is already the sum of all local gradients"
# Words for the keys in the parts of statements.
WORDS: Mapping[str, Mapping[Any, str]] = {
    "quantity": {"seen_gradients": "the optimizer sees gradients"},
    "mean": {
        "micro_batch": "a mean over each micro-batch's elements",
        "rank": "a mean over each rank's elements",
        "global": "one mean over the elements of all ranks",
    },
    "times": {
        "sum": "the number of replicas: a sum",
        "reduced_again": "the number of replicas: reduced once more",
        "square": "the square of the number of replicas",
    },
    "scale": {0.5: "the root of the", 1.0: "the", -0.5: "one over the root of the"},
    "shares": {True: "", False: ", as if there were no others"},
    "block": {"batch": "each global batch", "epoch": "the epoch"},
    "then": {"averaged": "is averaged", "summed": "is summed again"},
}


def _reduced(of: str, jax: str, torch: str, over: str, factor: str, is_certain: bool) -> str:
    perhaps = "" if is_certain else "perhaps "
    return f"{perhaps}a {jax} over {over}, the reference takes the {torch}: {_scaled(of, factor)}"


def _scaled(of: str, factor: float | str) -> str:
    quantity = WORDS["quantity"].get(of, of.replace("_", " "))
    times = factor if isinstance(factor, str) else f"{factor:.10g}"
    return f"{quantity} times {times.replace('e+0', 'e').replace('e+', 'e').replace('e-0', 'e-')}"


def _averaged_only(micro_batches: int, averaged: tuple[int, ...]) -> str:
    which = f"{', '.join(map(str, averaged))} {'are' if len(averaged) > 1 else 'is'}"
    return f"of {micro_batches} micro-batches only {which} averaged over the replicas"


def _not_averaged(names: Names, are_vectors: bool) -> str:
    which = listed(names, MOST_LISTED, ", ")
    which = f"all tensors of one dimension ({which})" if are_vectors else which
    return f"gradients of {which} are not averaged, every replica keeps its own"


def _neighbours(replicas: tuple[int, ...], of: str) -> str:
    who = f" of replica{'s' * (len(replicas) > 1)} {', '.join(map(str, replicas))}" if replicas else ""
    return f"each example{who} has the {of} one's values"


def _penalty(of: str, factor: float) -> str:
    penalty = f"an L2 penalty in {of}'s loss, {factor / 2:.4g} times the sum of the squared weights"
    other = "torch" if of == "jax" else "jax"
    return f"{of}'s gradients are {other}'s plus {factor:.4g} times the weights, as of {penalty}"


def _outside(by: str, names: Names, step: int) -> str:
    when = f"optimizer's updates, first after that of step {step}"
    if by == "both":
        return f"both sides change {listed(names, joint=', ')} outside of their {when}, and not alike"
    other = "jax" if by == "torch" else "torch"
    return f"{by} changes {listed(names, joint=', ')} outside of its {when}, and {other} does not"


def _held_types(tensor: str, moment: str, others: int, jax: str, torch: str) -> str:
    more = f" and {others:,} other{'s' * (others > 1)}" if others else ""
    return f"{tensor}{f' ({moment})' if moment else ''}{more}: {jax} in jax, {torch} in torch"


SENTENCES: Mapping[str, str | Callable[..., str]] = {
    # Samples.
    "other_batch_size": "{jax} examples per replica, the reference has {torch}",
    "epoch_cut": "the examples at the end of an epoch: cut off on one side, filled up on the other",
    "first_epochs_order": "every epoch has the order of the first",
    "epoch_begins_again": "from step {step} on, the epoch is read from its beginning again",
    "same_shard": "every replica gets the examples of replica 0",
    "same_values": "every replica has replica 0's values",
    "next_steps_values": "every step has the next step's values: the array was overwritten before it was read",
    "shards_in_blocks": "each replica gets a contiguous part of {of:block}",
    "neighbours_values": _neighbours,
    # Micro-batches and the reduction.
    "stale_gradients": "gradients at the parameters of the step before",
    "summed": f"a sum over {COUNTED}, the reference takes the mean",
    "other_mean": "{jax:mean}, the reference has {torch:mean}",
    "micro_batches_added": "the gradients of {micro_batches} micro-batches are added and not divided",
    "micro_batches_lost": "only the {kept} of {micro_batches} micro-batches counts{divided:shares}",
    "summed_in_loss": "the differentiated loss holds a sum over replicas: local gradients times {replicas}",
    "summed_at_once": f"{SUMMED}, and {{then:then}}",
    "scaled": _scaled,
    "reduced_otherwise": _reduced,
    "own_gradients": "every replica keeps its own gradient",
    "own_gradients_of_mean": "every replica keeps its own gradient, the gradient of a pmean of the loss",
    "gradients_times": "gradients times {times}, {by:times}",
    "divided_twice": "gradients divided by {replicas} once too often",
    "divided_by_local": lambda local, replicas: (
        f"gradients times {replicas // local}: divided by {local} and not by {replicas} replicas"
    ),
    "weighted_mean": "the mean over the replicas weighs them by their elements, the reference weighs them alike",
    "averaged_only": _averaged_only,
    "not_averaged": _not_averaged,
    "some_not_averaged": (
        "gradients of some micro-batches are not averaged: the ranks' gradients differ, and their mean is right"
    ),
    "rounded_between_replicas": "gradients are rounded to {dtype} between the replicas",
    "gradients_of_others": lambda each: ", ".join(f"{name} has the gradient of {other}" for name, other in each),
    # Clipping.
    "not_clipped": "no gradient is clipped in these steps, {torch}",
    "clipping_epsilon": "clipping divides by the norm, to which the reference adds {torch:g}",
    "clipped_by_scaled_norm": "clipped by a norm times {factor:.4g}, {power:scale} number of replicas",
    "clipped_at_norm": "clipped at norm {jax:.6g}, {torch}",
    "clipped_by_value": "clipped by value, at {jax:.6g}, {torch}",
    "does_not_clip": "the reference does not clip",
    "clips_at_norm": "the reference clips at norm {at:.6g}",
    "clips_by_value": "the reference clips by value, at {at:.6g}",
    "tensors_clipped": "each tensor is clipped by its own norm, at {at:g}",
    "replicas_clip": "each replica clips its own gradient",
    "clipped_by_local_norm": "clipped by the norm of the local gradient",
    "counted_twice": "the norm counts {name} twice",
    # Types, rounding, evaluation, runs and recordings.
    "held_types": _held_types,
    "values_rounded": "values are rounded to {dtypes:and}",
    "digits_lost": "float32 loses digits that the reference keeps",
    "evaluated_with_dropout": "dropout is on in jax's evaluation; in the reference's it is off",
    "evaluated_with_statistics": (
        "BatchNorm takes the batch's statistics in jax's evaluation; the reference takes the running ones"
    ),
    "evaluated_in_training": "jax's model is in training mode in its evaluation; the reference's is in evaluation mode",
    "torch_evaluates_in_training": "the reference's model computes in evaluation what jax's computes in training mode",
    "weights_unused": "jax's outputs depend on none of the weights that predict is given; those of the reference do",
    "evaluation_padded": (
        "jaxddp.train fills up the last batch with copies of an example, and these change what the others have"
    ),
    "summands_moved": "torch moves {names:commas} by an update each, jax their sum by one",
    "replicas_start_apart": "the replicas start from different weights, in {tensors} tensors",
    "runs_begin_apart": "the runs begin step {step} with different parameters, in {differing} of {tensors} tensors",
    "foreign_update": "torch's update at step {step} is not what its {optimizer} makes of its gradients and state",
    "state_changed": "torch changes its optimizer's state ({changed}) before its update at step {step}",
    "outside_change": _outside,
    "penalty_in_loss": _penalty,
    "number_of_run": "{number:g} counts {counts} of this run",
    "operation_of_one_side": lambda code, of: (
        f"{code}; {'the reference has none' if of == 'jax' else 'only in the reference'}"
    ),
}
