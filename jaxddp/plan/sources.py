"""Workloads of a program's flags, and of the presets."""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from jaxddp import optim
from jaxddp.config import TrainerConfig
from jaxddp.data.batches import of_batches, to_arrays
from jaxddp.data.run_data import load_data
from jaxddp.nn.any_model import AnyFunctional, functional_of, transformation_of
from jaxddp.nn.functional import Functional, cast
from jaxddp.nn.losses import Batch, LossFunction, cross_entropy
from jaxddp.nn.model_tree import seeing
from jaxddp.nn.program_losses import losses_of
from jaxddp.plan.options import PlanOptions, PlanTrainerOptions
from jaxddp.plan.presets import PRESETS
from jaxddp.plan.workload import AnyStep, Shapes, Workload
from jaxddp.program import Program, bound, default_config
from jaxddp.step.options import options as step_options
from jaxddp.step.program_step import program_step
from jaxddp.step.replica_step import ReplicaStep

STEPS = 1000  # of a run, for schedules: the program does not depend on it


def workload_of(options: PlanTrainerOptions, program: Program) -> Workload:
    """Return the workload that the flags select.

    Raises:
        InputError: flags that do not fit each other, or a program that is not complete.
    """
    config = options.of_trainer(program)
    if isinstance(options, PlanOptions) and (preset := PRESETS.get(options.model)) is not None:
        functional, size = Functional(preset.model()), options.batch_size or preset.batch_size
        step = _step(config, functional, cross_entropy)
        return _workload(options.model, config, functional, step, preset.example, size)
    with jax.enable_x64(config.dtype == "float64"):
        return _of_program(program.bound(config).located(), config, options)


def _of_program(program: Program, config: TrainerConfig, options: PlanTrainerOptions) -> Workload:
    """Return the workload of a program's JAX side."""
    trains = program.get("train_data") is not None
    has_data = trains or program.get("batch", program.get("jax_batch")) is not None
    (make_model, *_) = program.need("jax_model", *([] if has_data else ["train_data"]))
    if program.get("jax_loss") is None:  # a program may leave it out, like classifiers
        program = dataclasses.replace(program, values={**program.values, "jax_loss": cross_entropy})
    if trains:
        batch = load_data(program, config).example()
        size = options.batch_size or _share(config, program, options.devices)
    else:
        batch = to_arrays(program.get("batch", program.get("jax_batch"))(0, 0), f"{program.name}: batch(0, 0)")
        size = options.batch_size or len(next(iter(batch.values())))
    model, loss_fn = make_model(), losses_of(program)
    functional = functional_of(model, loss_fn, lambda: batch)
    title = program.get("title", lambda: Path(program.name).name)()
    if trains and not options.batch_size and size * options.devices != config.global_batch_size:
        title += f"  ·  global batch {size * options.devices} in place of {config.global_batch_size}"
    optimizer = program.get("jax_optimizer")
    optimizer = bound(optimizer, total_steps=STEPS, steps_per_epoch=STEPS)
    if trains and program.get("jax_step") is not None:
        program.need("jax_optimizer", reason=", which jax_step needs")
        step: AnyStep = program_step(functional, of_batches(program.get("jax_step")), optimizer)
    else:
        step = _step(config, functional, loss_fn, None if optimizer is None else transformation_of(optimizer, model))
    # As `jaxddp train` multiplies: without TF32.
    precision = "highest" if trains else None
    return _workload(title, config, functional, step, _shapes(batch), size, precision)


def _share(config: TrainerConfig, program: Program, gpus: int) -> int:
    """Return the examples per GPU; round a global batch up that the program sets, and no flag, for other devices."""
    if config.global_batch_size == default_config(program, TrainerConfig).global_batch_size:
        return -(-config.global_batch_size // (gpus * config.accumulation_steps)) * config.accumulation_steps
    return config.per_replica_batch_size(gpus)


def _step(
    config: TrainerConfig, functional: AnyFunctional, loss_fn: LossFunction, optimizer: Any = None
) -> ReplicaStep:
    optimizer = optim.from_config(config, STEPS) if optimizer is None else seeing(functional.param_tree, optimizer)
    return ReplicaStep(
        functional.local_loss(loss_fn, train=True, masks=config.dropout_masks, amp=config.amp),
        optimizer,
        **step_options(config, functional) | {"find_unused_parameters": None},
    )


def _workload(
    name: str,
    config: TrainerConfig,
    functional: AnyFunctional,
    step: AnyStep,
    example: Shapes,
    size: int,
    precision: str | None = None,
) -> Workload:
    arrays = cast(functional.params, config.dtype), cast(functional.buffers, config.dtype)
    return Workload(name, step, *arrays, example, size, config.accumulation_steps, precision, config.dtype == "float64")


def _shapes(arrays: Batch) -> Shapes:
    """Return the shapes of one example, in the dtypes that jax gives them."""
    return {
        name: jax.ShapeDtypeStruct(array.shape[1:], jax.dtypes.canonicalize_dtype(array.dtype))
        for name, array in arrays.items()
    }
