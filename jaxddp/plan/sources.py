"""Workloads of the trainer's flags, of the presets, and of a user's script."""

from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxddp import models, optim
from jaxddp.config import TrainConfig
from jaxddp.config.choices import OPTIMIZERS
from jaxddp.data import datasets
from jaxddp.errors import InputError, check_name
from jaxddp.nn.any_model import functional_of, transformation_of
from jaxddp.nn.functional import Functional, cast
from jaxddp.nn.losses import Batch, Losses, as_losses, cross_entropy
from jaxddp.nn.plain import PlainFunctional
from jaxddp.plan.options import PlanOptions
from jaxddp.plan.presets import PRESETS
from jaxddp.plan.workload import Shapes, Workload
from jaxddp.scripts import errors_located, run_file
from jaxddp.step.options import options as step_options
from jaxddp.step.replica_step import ReplicaStep

STEPS = 1000  # of a run, for schedules: the program does not depend on it


def workload_of(options: PlanOptions) -> Workload:
    """Return the workload that the flags select.

    Raises:
        InputError: flags that do not fit each other, or a script that is not complete.
    """
    if options.script is not None:
        return _of_script(options.script, options)
    if options.model in PRESETS:
        preset = PRESETS[options.model]
        size = options.batch_size or preset.batch_size
        return _of_module(options.model, options.config, preset.model(), preset.example, size)
    config = options.config
    with jax.enable_x64(config.dtype == "float64"):
        dataset = datasets.load(config).astype(config.dtype)
        model = models.build(config, dataset)
        size = options.batch_size or config.per_replica_batch_size(options.world_size)
        example = _shapes(dataset.train)
        # As `python -m jaxddp.train` multiplies: without TF32.
        return _of_module(f"{config.model} on {config.dataset}", config, model, example, size, "highest")


def _of_module(
    name: str, config: TrainConfig, model: nnx.Module, example: Shapes, size: int, precision: str | None = None
) -> Workload:
    functional = Functional(model)
    step = ReplicaStep(
        functional.local_loss(cross_entropy, train=True, masks=config.dropout_masks, amp=config.amp),
        optim.from_config(config, STEPS),
        **step_options(config, model),
    )
    arrays = cast(functional.params, config.dtype), cast(functional.buffers, config.dtype)
    return Workload(name, step, *arrays, example, size, config.accumulation_steps, precision, config.dtype == "float64")


def _of_script(path: Path, options: PlanOptions) -> Workload:
    """Return the workload of a script with the names of a port file's JAX side (`jaxddp.parity.port`)."""
    script = run_file(path)
    make_batch: Any = getattr(script, "batch", None) or getattr(script, "flax_batch", None)
    for name, value in (("flax_model", getattr(script, "flax_model", None)), ("batch", make_batch)):
        if not callable(value):
            raise InputError(f"{path}: {name}: must be a function, and is {type(value).__name__}")
    loss_of = getattr(script, "flax_loss", cross_entropy)

    def loss(model: Any, batch: Batch) -> Losses:
        return as_losses(loss_of(model, batch), "flax_loss")

    with errors_located(path):
        batch = {name: np.asarray(array) for name, array in make_batch(0, 0).items()}
        model = script.flax_model()
        optimizer = _optimizer(path, script, model)
        functional = functional_of(model, loss_of, lambda: batch)
    if isinstance(functional, PlainFunctional):
        local_loss = functional.local_loss(loss_of)
    elif isinstance(functional, Functional):
        local_loss = functional.local_loss(loss, train=True)
    else:
        local_loss = functional.local_loss(loss)
    step = ReplicaStep(
        local_loss,
        optimizer,
        loss_normalization=getattr(script, "loss_normalization", "ddp"),
        clip_grad_norm=getattr(script, "clip_grad_norm", None),
        find_unused_parameters=None,
    )
    size = options.batch_size or len(next(iter(batch.values())))
    pieces = getattr(script, "accumulation_steps", 1)
    return Workload(path.name, step, functional.params, functional.buffers, _shapes(batch), size, pieces)


def _optimizer(path: Path, script: ModuleType, model: Any) -> Any:
    optimizer = getattr(script, "flax_optimizer", None)
    if optimizer is not None:
        return transformation_of(optimizer, model)
    chosen = getattr(script, "optimizer", "adam")
    if isinstance(chosen, str):
        check_name(f"{path}: optimizer", chosen, OPTIMIZERS)
        chosen = TrainConfig(optimizer=chosen)
    return optim.from_config(chosen, STEPS)


def _shapes(arrays: Batch) -> Shapes:
    """Return the shapes of one example, in the dtypes that jax gives them."""
    return {
        name: jax.ShapeDtypeStruct(array.shape[1:], jax.dtypes.canonicalize_dtype(array.dtype))
        for name, array in arrays.items()
    }
