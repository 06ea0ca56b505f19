"""Planted faults, and the edits that plant one in a JAX half."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .scenarios import Scenario, Translation
from .steps import Step

Edit = Callable[[Translation], Translation]


@dataclass(frozen=True)
class Planted:
    """A planted fault.

    Attributes:
        edit: correct translation -> translation with the fault.
        scenarios: ports in which the fault makes a difference.
        stage: first stage that differs.
        also: names of faults that no run can distinguish from this one -> reason.
        step: first step that differs, counted from 1; this and what follows are of a fault outside the catalogue.
        tensor: prefix of torch's name of the tensor that differs most there; "": any.
        layer: torch's name of the first layer whose output differs; "": none, or only the loss.
        named: names of the edits that the diagnosis finds, one per difference; (): none.
    """

    edit: Edit
    scenarios: tuple[Scenario, ...]
    stage: str
    also: Mapping[str, str] = field(default_factory=dict)
    step: int = 1
    tensor: str = ""
    layer: str = ""
    named: tuple[str, ...] = ()


def on(name: str, *optimizers: str, world_size: int = 2) -> tuple[Scenario, ...]:
    """Return a scenario with each of several optimizers; by default SGD and AdamW."""
    return tuple(Scenario(name, optimizer, world_size) for optimizer in optimizers or ("sgd", "adamw"))


def step(shows: tuple[str, ...] | None = None, **pieces: Any) -> Edit:
    """Replace pieces of the replica step, which the port then brings itself."""

    def edit(right: Translation) -> Translation:
        own: Step = replace(right.custom_step, **pieces)
        return replace(right, step=own if shows is None else replace(own, shows=shows))

    return edit


def optimizer(**pieces: Any) -> Edit:
    """Replace pieces of the optax chain."""
    return lambda right: replace(right, optimizer=replace(right.optimizer, **pieces))


def recipe(**numbers: Any) -> Edit:
    """Replace numbers of the optax chain."""

    def edit(right: Translation) -> Translation:
        wrong = replace(right.optimizer.recipe, **numbers)
        return replace(right, optimizer=replace(right.optimizer, recipe=wrong))

    return edit


def model(**options: Any) -> Edit:
    """Build the jax module with other options."""
    return lambda right: replace(right, options={**right.options, **options})


def both(*edits: Edit) -> Edit:
    """Apply one edit after the other."""

    def edit(right: Translation) -> Translation:
        for one in edits:
            right = one(right)
        return right

    return edit
