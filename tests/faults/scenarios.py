"""Correct ports of several models and optimizers, without symmetries in which a fault could hide.

Inputs have a mean far from 0, images and kernels are not square, replicas and micro-batches have unequal numbers of
labels, clipping is active in some steps only, decay is not the default, the rate changes every step, and the number
of examples is no multiple of the number of replicas.
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
    """Settings of the scenarios of one name.

    Attributes:
        family: key of `models_torch.MODELS`.
        clip_grad_norm: largest norm, in the middle of the norms that occur.
        accumulation_steps: micro-batches per batch, not equal to the number of replicas, so that the two differ.
        batch_size: examples per replica.
        matrices_only: decay matrices only, not biases and norms.
        rates: key of `recipes.SCHEDULES`.
        unused: add a layer that the loss does not depend on.
        drop_last: drop the end of an epoch instead of padding it.
        custom_step: write a `jax_step` in the port.
    """

    family: str
    clip_grad_norm: float
    accumulation_steps: int = 1
    batch_size: int = 6
    matrices_only: bool = False
    rates: str = "root"
    unused: bool = False
    drop_last: bool = False
    custom_step: bool = False


SETTINGS: dict[str, Setting] = {
    "mlp": Setting("mlp", 0.4),
    "mlp_penalty": Setting("mlp_penalty", 0.4),
    "mlp_dropout": Setting("mlp_dropout", 0.4),
    "mlp_groups": Setting("mlp", 0.4, matrices_only=True),
    "mlp_warm_cosine": Setting("mlp", 0.4, rates="cosine"),
    "mlp_warm_line": Setting("mlp", 0.4, rates="line"),
    "mlp_warm_long": Setting("mlp", 0.4, rates="long"),
    "mlp_accumulated": Setting("mlp", 0.4, accumulation_steps=3),
    "mlp_drop_last": Setting("mlp", 0.4, drop_last=True),
    "mlp_own_step": Setting("mlp", 0.4, accumulation_steps=3, custom_step=True),
    "convnet": Setting("convnet", 0.5),
    "convnet_accumulated": Setting("convnet", 0.4, accumulation_steps=3, batch_size=12),
    "policy": Setting("policy", 0.5, batch_size=12),
    "resnet": Setting("resnet", 6.5),
    "tokens": Setting("tokens", 3.2),
    "tokens_groups": Setting("tokens", 3.2, matrices_only=True),
    "tokens_unused": Setting("tokens", 3.2, unused=True),
    "tokens_global": Setting("tokens_global", 3.2, accumulation_steps=3),
    "tokens_weighted": Setting("tokens_global", 3.2, accumulation_steps=3),
    "tokens_sum": Setting("tokens_sum", 4.6, accumulation_steps=3),
}


@dataclass(frozen=True)
class Scenario:
    """A correct port, as a few values that are cheap to pickle.

    Attributes:
        name: key of `SETTINGS`.
        optimizer: key of `recipes.RECIPES`.
        seed: seed of data, order and masks.
    """

    name: str
    optimizer: str = "sgd"
    world_size: int = 2
    steps: int = 10
    seed: int = 0

    @property
    def setting(self) -> Setting:
        """Settings of this name."""
        return SETTINGS[self.name]

    @property
    def recipe(self) -> Recipe:
        """Numbers of the optimizer."""
        recipe = RECIPES[self.optimizer]
        return Recipe(**{**vars(recipe), "matrices_only": self.setting.matrices_only, "rates": self.setting.rates})

    @property
    def size(self) -> int:
        """Number of examples: one less than five batches for every replica."""
        return 5 * self.setting.batch_size * self.world_size - 1

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps per epoch of the reference."""
        return data.steps_per_epoch(self.size, self.world_size, self.setting.batch_size, self.setting.drop_last)

    def order(self, step: int) -> np.ndarray:
        """Return the indices of all replicas' examples at a step, shape (world_size, batch_size)."""
        return self.order_of(*divmod(step, self.steps_per_epoch), self.setting.drop_last)

    def order_of(self, epoch: int, batch: int, drop_last: bool) -> np.ndarray:
        """Return the indices of all replicas' examples in a batch of an epoch."""
        return data.indices(self.size, self.world_size, self.setting.batch_size, self.seed, epoch, batch, drop_last)

    def translation(self) -> "Translation":
        """Return the correct JAX half."""
        model, loss = models_flax.MODELS[self.setting.family]
        options = {"unused": True} if self.setting.unused else {}
        optimizer = Optimizer(self.recipe, skips_unused=self.setting.unused)
        return Translation(self, model, loss, optimizer, options)

    def custom_step(self) -> Step:
        """Return a correct replica step, for a port that brings one."""
        step = partial(Step, self.setting.accumulation_steps, self.setting.clip_grad_norm)
        if self.loss_normalization == "ddp":
            return step()
        return step(count=count_labels, combine=over_all_elements)

    @property
    def loss_normalization(self) -> str:
        """Loss normalization of the reference."""
        return "global" if self.name == "tokens_global" else "ddp"

    def port(self) -> Port:
        """Return the correct port."""
        return self.translation().port()


@dataclass(frozen=True)
class Translation:
    """JAX half of a port, in pieces that can each be wrong.

    Attributes:
        scenario: scenario whose reference is translated.
        model, options: jax module and its options.
        loss: loss of the module.
        optimizer: twin in optax.
        step: the port's replica step; None: jaxddp's.
        order: (scenario, step) -> indices of all replicas' examples.
        mask_of: (step, rank) -> step and rank whose mask the replica takes.
        reread: (batch function, step, rank) -> batch that reaches the device.
        start: see `Port.jax_start`.
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
    def custom_step(self) -> Step:
        """Replica step of the port, for edits to change."""
        return self.step or self.scenario.custom_step()

    def loaded(self, step: int, rank: int) -> Arrays:
        """Return a replica's batch as the loader makes it."""
        scenario, setting = self.scenario, self.scenario.setting
        arrays = data.dataset(setting.family, scenario.size, scenario.seed)
        chosen = self.order(scenario, step)
        batch = {name: array[chosen[rank]] for name, array in arrays.items()}
        size = len(chosen[rank])
        if setting.family.startswith("mlp"):
            batch["mask"] = data.mask(scenario.seed, *self.mask_of(step, rank), size, models_torch.HIDDEN)
        if setting.family == "tokens_sum":
            labels = arrays["y"][chosen]
            batch["items"] = np.full(size, float((labels != models_torch.IGNORED).sum()))
            batch["parts"] = np.full(size, float(scenario.world_size * setting.accumulation_steps))
        return batch

    def batch(self, step: int, rank: int) -> Arrays:
        """Return a replica's batch as it reaches the device."""
        return self.reread(self.loaded, step, rank)

    def port(self) -> Port:
        """Return the scenario's port with this JAX half."""
        scenario, setting = self.scenario, self.scenario.setting
        right = scenario.translation()
        torch_model, torch_loss = models_torch.MODELS[setting.family]
        options = {"unused": True} if setting.unused else {}
        same_data = (self.order, self.mask_of, self.reread) == (right.order, right.mask_of, right.reread)
        batches = {"batch": right.batch} if same_data else {"torch_batch": right.batch, "jax_batch": self.batch}
        optimizer = self.optimizer.build()
        return Port(
            torch_model=partial(torch_model, **options),
            jax_model=partial(self.model, **self.options),
            torch_loss=torch_loss,
            jax_loss=self.loss,
            **batches,
            torch_optimizer=scenario.recipe.torch_optimizer,
            torch_scheduler=scenario.recipe.torch_scheduler,
            jax_optimizer=optimizer,
            accumulation_steps=setting.accumulation_steps,
            clip_grad_norm=setting.clip_grad_norm,
            loss_normalization=scenario.loss_normalization,
            find_unused_parameters=setting.unused,
            steps_per_epoch=scenario.steps_per_epoch,
            jax_step=self.custom_step if setting.custom_step else self.step,
            jax_start=self.start,
            jax_restore=self.restore and partial(self.restore, optimizer),
            restore_at=self.restore_at,
        )
