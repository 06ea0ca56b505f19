"""Correct ports, of several kinds of model and optimizer, that leave no symmetry for a fault to hide in.

Inputs have a mean far from 0, images and kernels are not square, replicas and micro-batches have
unequal numbers of labels, clipping is active at some steps only, decay is not the default, the
rate changes every step, and the data set does not divide by the number of replicas.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import optax

from jaxddp.parity.port import Port
from jaxddp.state import TrainState

from . import data, models_flax, models_torch
from .data import Arrays
from .recipes import RECIPES, Optimizer, Recipe
from .steps import Step, count_labels, over_all_elements

Order = Callable[["Scenario", int], np.ndarray]
Restore = Callable[[optax.GradientTransformation, TrainState], TrainState]


@dataclass(frozen=True)
class Setting:
    """What a scenario's name stands for.

    Attributes:
        family: of `models_torch.MODELS`.
        clip_grad_norm: in the middle of the norms that occur.
        accumulation_steps: another number than that of the replicas, so that the two are told apart.
        batch_size: of a replica.
        matrices_only: whether biases and norms are free of decay.
        unused: whether the model has a layer that the loss does not reach.
        drop_last: whether the end of an epoch is cut off, not filled up.
        own_step: whether the port brings its own replica step.
    """

    family: str
    clip_grad_norm: float
    accumulation_steps: int = 1
    batch_size: int = 6
    matrices_only: bool = False
    unused: bool = False
    drop_last: bool = False
    own_step: bool = False


SETTINGS: dict[str, Setting] = {
    "mlp": Setting("mlp", 0.4),
    "mlp_groups": Setting("mlp", 0.4, matrices_only=True),
    "mlp_accumulated": Setting("mlp", 0.4, accumulation_steps=3),
    "mlp_drop_last": Setting("mlp", 0.4, drop_last=True),
    "mlp_own_step": Setting("mlp", 0.4, accumulation_steps=3, own_step=True),
    "convnet": Setting("convnet", 0.5),
    "convnet_accumulated": Setting("convnet", 0.4, accumulation_steps=3, batch_size=12),
    "tokens": Setting("tokens", 3.2),
    "tokens_unused": Setting("tokens", 3.2, unused=True),
    "tokens_global": Setting("tokens_global", 3.2, accumulation_steps=3),
    "tokens_weighted": Setting("tokens_global", 3.2, accumulation_steps=3),
    "tokens_sum": Setting("tokens_sum", 4.6, accumulation_steps=3),
}


@dataclass(frozen=True)
class Scenario:
    """A correct port; small, so that it crosses to other processes.

    Attributes:
        name: of `SETTINGS`.
        optimizer: of `recipes.RECIPES`.
        seed: of data, order and masks.
    """

    name: str
    optimizer: str = "sgd"
    world_size: int = 2
    steps: int = 10
    seed: int = 0

    @property
    def setting(self) -> Setting:
        """What the name stands for."""
        return SETTINGS[self.name]

    @property
    def recipe(self) -> Recipe:
        """The optimizer's numbers."""
        recipe = RECIPES[self.optimizer]
        return Recipe(**{**vars(recipe), "matrices_only": self.setting.matrices_only})

    @property
    def size(self) -> int:
        """Of the data set: one short of five batches for every replica."""
        return 5 * self.setting.batch_size * self.world_size - 1

    @property
    def steps_per_epoch(self) -> int:
        """Of the reference."""
        return data.steps_per_epoch(self.size, self.world_size, self.setting.batch_size, self.setting.drop_last)

    def order(self, step: int) -> np.ndarray:
        """The examples of all replicas at one step, shape (world_size, batch_size)."""
        return self.order_of(*divmod(step, self.steps_per_epoch), self.setting.drop_last)

    def order_of(self, epoch: int, batch: int, drop_last: bool) -> np.ndarray:
        """The examples of one batch of one epoch."""
        return data.indices(self.size, self.world_size, self.setting.batch_size, self.seed, epoch, batch, drop_last)

    def translation(self) -> "Translation":
        """The correct JAX half."""
        model, loss = models_flax.MODELS[self.setting.family]
        options = {"unused": True} if self.setting.unused else {}
        optimizer = Optimizer(self.recipe, skips_unused=self.setting.unused)
        return Translation(self, model, loss, optimizer, options)

    def own_step(self) -> Step:
        """A correct replica step of the port's own."""
        step = partial(Step, self.setting.accumulation_steps, self.setting.clip_grad_norm)
        if self.loss_normalization == "ddp":
            return step()
        return step(count=count_labels, combine=over_all_elements)

    @property
    def loss_normalization(self) -> str:
        """What the reference's losses are means over."""
        return "global" if self.name == "tokens_global" else "ddp"

    def port(self) -> Port:
        """The correct port."""
        return self.translation().port()


@dataclass(frozen=True)
class Translation:
    """The JAX half of a port, in the pieces in which it can be wrong.

    Attributes:
        scenario: whose reference it translates.
        model, options: the flax module and how it is made.
        loss: of it.
        optimizer: the optax twin.
        step: the port's own; None: jaxddp's.
        order: (scenario, step) -> the examples of all replicas; None: the reference's.
        mask_of: (step, rank) -> whose mask a replica takes.
        reread: (batch function, step, rank) -> what reaches the device.
        start: see `Port.flax_start`.
        restore: (optimizer, state) -> state.
        restore_at: see `Port.restore_at`.
    """

    scenario: Scenario
    model: Callable[..., Any]
    loss: Callable[..., Any]
    optimizer: Optimizer
    options: Mapping[str, Any] = field(default_factory=dict)
    step: Step | None = None
    order: Order = Scenario.order
    mask_of: Callable[[int, int], tuple[int, int]] = lambda step, rank: (step, rank)
    reread: Callable[..., Arrays] = lambda batch, step, rank: batch(step, rank)
    start: Callable[[Mapping[str, Any], int], Mapping[str, Any]] | None = None
    restore: Restore | None = None
    restore_at: int | None = None

    @property
    def own_step(self) -> Step:
        """The replica step, to be written wrongly."""
        return self.step or self.scenario.own_step()

    def loaded(self, step: int, rank: int) -> Arrays:
        """A replica's batch as its loader makes it."""
        scenario, setting = self.scenario, self.scenario.setting
        arrays = data.dataset(setting.family, scenario.size, scenario.seed)
        chosen = self.order(scenario, step)
        batch = {name: array[chosen[rank]] for name, array in arrays.items()}
        size = len(chosen[rank])
        if setting.family == "mlp":
            batch["mask"] = data.mask(scenario.seed, *self.mask_of(step, rank), size, models_torch.HIDDEN)
        if setting.family == "tokens_sum":
            labels = arrays["y"][chosen]
            batch["items"] = np.full(size, float((labels != models_torch.IGNORED).sum()))
            batch["parts"] = np.full(size, float(scenario.world_size * setting.accumulation_steps))
        return batch

    def batch(self, step: int, rank: int) -> Arrays:
        """A replica's batch."""
        return self.reread(self.loaded, step, rank)

    def port(self) -> Port:
        """The scenario's port with this JAX half."""
        scenario, setting = self.scenario, self.scenario.setting
        right = scenario.translation()
        torch_model, torch_loss = models_torch.MODELS[setting.family]
        options = {"unused": True} if setting.unused else {}
        same_data = (self.order, self.mask_of, self.reread) == (right.order, right.mask_of, right.reread)
        batches = {"batch": right.batch} if same_data else {"torch_batch": right.batch, "flax_batch": self.batch}
        optimizer = self.optimizer.build()
        return Port(
            torch_model=partial(torch_model, **options),
            flax_model=partial(self.model, **self.options),
            torch_loss=torch_loss,
            flax_loss=self.loss,
            **batches,
            torch_optimizer=scenario.recipe.torch_optimizer,
            torch_scheduler=scenario.recipe.torch_scheduler,
            flax_optimizer=optimizer,
            accumulation_steps=setting.accumulation_steps,
            clip_grad_norm=setting.clip_grad_norm,
            loss_normalization=scenario.loss_normalization,
            find_unused_parameters=setting.unused,
            steps_per_epoch=scenario.steps_per_epoch,
            flax_step=self.own_step if setting.own_step else self.step,
            flax_start=self.start,
            flax_restore=self.restore and partial(self.restore, optimizer),
            restore_at=self.restore_at,
        )
