"""What a planted fault is, and the ways in which one changes a JAX half."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .scenarios import Scenario, Translation
from .steps import Step

Edit = Callable[[Translation], Translation]


@dataclass(frozen=True)
class Planted:
    """A fault, planted.

    Attributes:
        edit: a right translation to one with the fault.
        scenarios: where it makes a difference.
        stage: where it shows first.
        also: names that the run cannot tell from it, and why.
    """

    edit: Edit
    scenarios: tuple[Scenario, ...]
    stage: str
    also: Mapping[str, str] = field(default_factory=dict)


def on(name: str, *optimizers: str, world_size: int = 2) -> tuple[Scenario, ...]:
    """A scenario with each of several optimizers; by default one of either family."""
    return tuple(Scenario(name, optimizer, world_size) for optimizer in optimizers or ("sgd", "adamw"))


def step(shows: tuple[str, ...] | None = None, **pieces: Any) -> Edit:
    """An own replica step with these pieces."""

    def edit(right: Translation) -> Translation:
        own: Step = replace(right.own_step, **pieces)
        return replace(right, step=own if shows is None else replace(own, shows=shows))

    return edit


def optimizer(**pieces: Any) -> Edit:
    """Another optax chain."""
    return lambda right: replace(right, optimizer=replace(right.optimizer, **pieces))


def recipe(**numbers: Any) -> Edit:
    """Other numbers in the optax chain."""

    def edit(right: Translation) -> Translation:
        wrong = replace(right.optimizer.recipe, **numbers)
        return replace(right, optimizer=replace(right.optimizer, recipe=wrong))

    return edit


def model(**options: Any) -> Edit:
    """The flax module made otherwise."""
    return lambda right: replace(right, options={**right.options, **options})


def both(*edits: Edit) -> Edit:
    """One edit after the other."""

    def edit(right: Translation) -> Translation:
        for one in edits:
            right = one(right)
        return right

    return edit
