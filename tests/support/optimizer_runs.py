"""Runs of an optimizer in both frameworks on the same gradients and torch's weights."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np
import optax
import torch
from jax import numpy as jnp

from jaxddp.parity.compare.clipping import NOT_CLIPPED, Clipping
from jaxddp.parity.diagnosis.optimizer.update_causes import OptimizerEvidence, OptimizerStep, reference_residuals
from jaxddp.parity.diagnosis.optimizer.update_evidence import by_part
from jaxddp.parity.jax_side.side import optimizer_tensors
from jaxddp.parity.records import stage_norm

Shapes = Mapping[str, tuple[int, ...]]
Parameters = Mapping[str, torch.nn.Parameter]
FlaxOptimizer = optax.GradientTransformation | optax.GradientTransformationExtraArgs

SHAPES: Shapes = {
    "fc1.weight": (12, 6),
    "fc1.bias": (12,),
    "norm.weight": (12,),
    "norm.bias": (12,),
    "fc2.weight": (12, 12),
    "fc2.bias": (12,),
    "head.weight": (5, 12),
    "head.bias": (5,),
}
STEPS_AHEAD = 30  # steps of the schedule beyond the run


def one_group(parameters: Parameters) -> list[dict[str, Any]]:
    return [{"params": list(parameters.values())}]


def matrices_decay(parameters: Parameters) -> list[dict[str, Any]]:
    """Return two groups: matrices, which decay, and the others, which do not."""
    matrices = [p for p in parameters.values() if p.ndim > 1]
    return [{"params": matrices}, {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0}]


def still_biases(parameters: Parameters) -> list[dict[str, Any]]:
    """Return three groups: matrices, of which the head has its own learning rate, and vectors, whose rate is 0."""
    of_head = parameters["head.weight"]
    matrices = [p for p in parameters.values() if p.ndim > 1 and p is not of_head]
    vectors = [p for p in parameters.values() if p.ndim < 2]
    return [{"params": matrices}, {"params": [of_head], "lr": 2e-3}, {"params": vectors, "lr": 0.0}]


def matrices_alone(parameters: Parameters) -> list[dict[str, Any]]:
    """Return one group, without vectors."""
    return [{"params": [p for p in parameters.values() if p.ndim > 1]}]


def fresh(transformation: FlaxOptimizer, state: Any, params: Any) -> Any:
    """Restore a state that has lost everything."""
    return transformation.init(params)


def run(
    torch_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    jax_optimizer: FlaxOptimizer,
    *,
    steps: int = 6,
    seed: int = 0,
    shapes: Shapes = SHAPES,
    groups: Callable[[Parameters], list[dict[str, Any]]] = one_group,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    unused: Mapping[int, Iterable[str]] | None = None,
    silent: Collection[str] = (),
    clipping: Clipping = NOT_CLIPPED,
    restored_at: int | None = None,
    restore: Callable[[FlaxOptimizer, Any, Any], Any] = fresh,
    world_size: int = 4,
    accumulation_steps: int = 3,
) -> OptimizerEvidence:
    """Run both optimizers on the same gradients; both get torch's weights at each step.

    Gradients span nine decades, and those of "norm.bias" are almost 0, as those of a bias before a BatchNorm.

    Args:
        torch_optimizer: parameter groups -> the reference's optimizer.
        jax_optimizer: the port's.
        steps: number of steps.
        seed: of weights and gradients.
        shapes: parameter -> shape.
        groups: parameters -> torch's parameter groups.
        scheduler: torch's optimizer -> its schedule; None: constant.
        unused: step -> parameters without a gradient.
        silent: parameters whose gradient is 0.
        clipping: how the reference clips its gradients; the port's optimizer is given unclipped ones.
        restored_at: number of steps after which the JAX side is saved and restored; None: never.
        restore: (optimizer, state, parameters) -> the restored state.
        world_size, accumulation_steps: of the run, for the diagnosis.
    """
    rng = np.random.default_rng(seed)
    params = {name: torch.nn.Parameter(torch.from_numpy(rng.normal(size=s) / 2)) for name, s in shapes.items()}
    names = {id(parameter): name for name, parameter in params.items()}
    sizes = {name: 10.0 ** rng.uniform(-9, 0, size=shape) for name, shape in shapes.items()}
    sizes["norm.bias"] = sizes["norm.bias"] * 1e-12
    optimizer = torch_optimizer(groups(params))
    schedule = scheduler(optimizer) if scheduler else torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    taken, rates = [], []
    with jax.enable_x64(True):
        state = jax_optimizer.init(_to_jax(params))
        for step in range(steps):
            absent = frozenset((unused or {}).get(step, ()))
            still = {*absent, *silent}
            gradients = {n: rng.normal(size=s) * sizes[n] * (n not in still) for n, s in shapes.items()}
            before, weights = {n: p.detach().numpy().copy() for n, p in params.items()}, _to_jax(params)
            if step == restored_at:
                state = restore(jax_optimizer, state, weights)
            clipped = float(clipping.factor(stage_norm(gradients)))
            given = {name: jnp.asarray(gradient) for name, gradient in gradients.items()}
            update, state = jax_optimizer.update(given, state, weights)
            gradients = {name: clipped * gradient for name, gradient in gradients.items()}
            moved = {name: np.asarray(tensor) for name, tensor in update.items()}
            shown = by_part(optimizer_tensors(jax.device_get(state), weights, dict))
            taken.append(OptimizerStep(_groups(optimizer, names), before, gradients, absent, moved, shown, clipped))
            rates.append(optimizer.param_groups[0]["lr"])
            for name, parameter in params.items():
                given_torch = clipping.by_value(gradients[name])
                parameter.grad = None if name in absent else torch.from_numpy(given_torch.copy())
            optimizer.step()
            schedule.step()
    for _ in range(STEPS_AHEAD):
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    kind = type(optimizer).__name__
    return OptimizerEvidence(kind, taken, rates, world_size, accumulation_steps, restored_at, clipping)


def worst(evidence: OptimizerEvidence) -> float:
    """Return the largest residual of a run's updates from the reference's, over steps and tensors."""
    return max(max(of_step.values()) for of_step in reference_residuals(evidence) or ())


def _to_jax(params: Parameters) -> dict[str, jax.Array]:
    return {name: jnp.asarray(parameter.detach().numpy().copy()) for name, parameter in params.items()}


def _groups(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    return [
        {"names": [names[id(p)] for p in group["params"]], **{k: v for k, v in group.items() if k != "params"}}
        for group in optimizer.param_groups
    ]
