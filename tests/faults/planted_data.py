"""Faults of the data that replicas receive."""

from dataclasses import replace
from typing import Any

import numpy as np

from .data import steps_per_epoch
from .planted_edits import Edit, Planted, on
from .scenarios import Scenario

RESUMED_AT = 3  # in the middle of the first epoch
RESUMED_LATE = 7  # in the middle of the second


def order(function: Any) -> Edit:
    """Replace the order of the examples by (scenario, step) -> examples."""
    return lambda right: replace(right, order=function)


def first_epoch_again(scenario: Scenario, step: int) -> np.ndarray:
    """Repeat the order of the first epoch, as without set_epoch."""
    return scenario.order_of(0, step % scenario.steps_per_epoch, scenario.setting.drop_last)


def other_end(scenario: Scenario, step: int) -> np.ndarray:
    """Drop the end of an epoch where the reference pads it, or the reverse."""
    setting, drop = scenario.setting, not scenario.setting.drop_last
    batches = steps_per_epoch(scenario.size, scenario.world_size, setting.batch_size, drop)
    return scenario.order_of(*divmod(step, batches), drop)


def rank_zero_everywhere(scenario: Scenario, step: int) -> np.ndarray:
    """Give every replica rank 0's examples."""
    right = scenario.order(step)
    return np.repeat(right[:1], scenario.world_size, axis=0)


def in_blocks(scenario: Scenario, step: int) -> np.ndarray:
    """Give each replica a contiguous part of the global batch."""
    right = scenario.order(step)
    return right.T.reshape(right.shape)


def labels_of_the_next(batch: Any, step: int, rank: int) -> Any:
    """Give each example of replica 1 the label of the next one in the batch."""
    arrays = batch(step, rank)
    return {**arrays, "y": np.roll(arrays["y"], -1, axis=0)} if rank == 1 else arrays


def resumed_from_the_beginning(at: int) -> Any:
    """Start the epoch again after `at` steps."""

    def function(scenario: Scenario, step: int) -> np.ndarray:
        return scenario.order(step if step < at else step - at % scenario.steps_per_epoch)

    return function


def resumed(at: int) -> Edit:
    """Save and load everything except the position in the data."""
    return lambda right: replace(
        right, order=resumed_from_the_beginning(at), restore=lambda chain, state: state, restore_at=at
    )


EVERY_DATA = on("mlp") + on("convnet") + on("tokens") + on("mlp", world_size=4)

FAULTS: dict[str, tuple[Any, ...]] = {
    "set_epoch_missing": (order(first_epoch_again), EVERY_DATA),
    "padding_or_dropping": (order(other_end), EVERY_DATA),
    "padding_or_dropping/padded": (order(other_end), on("mlp_drop_last")),
    "same_shard": (order(rank_zero_everywhere), EVERY_DATA),
    "shards_in_blocks": (order(in_blocks), EVERY_DATA),
    "neighbours_values": (lambda right: replace(right, reread=labels_of_the_next), EVERY_DATA),
    "sampler_offset_lost": (resumed(RESUMED_AT), EVERY_DATA),
    "sampler_offset_lost/late": (resumed(RESUMED_LATE), EVERY_DATA),
    "same_dropout_mask": (
        lambda right: replace(right, mask_of=lambda step, rank: (step, 0)),
        on("mlp") + on("mlp", world_size=4),
    ),
}
PLANTED = {label: Planted(edit, scenarios, "samples") for label, (edit, scenarios) in FAULTS.items()}
