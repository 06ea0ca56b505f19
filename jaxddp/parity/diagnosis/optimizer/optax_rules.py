"""Optax's optimizers that follow another rule than torch's of the same name, replayed as Optax computes them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax import numpy as jnp

from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.diagnosis.optimizer.program import OptimizerProgram
from jaxddp.parity.diagnosis.optimizer.update_evidence import OptimizerEvidence, residuals
from jaxddp.parity.diagnosis.search.decide import Hypothesis

Numbers = Mapping[str, float]


class OptaxRule(NamedTuple):
    """A rule of Optax's.

    Attributes:
        name: Optax's function.
        direction: torch's options -> the transformation before the learning rate.
    """

    name: str
    direction: Callable[[Numbers], optax.GradientTransformation]


RULES = {
    "NAdam": OptaxRule(
        "optax.nadam",
        lambda n: optax.scale_by_adam(n["betas[0]"], n["betas[1]"], n["eps"], nesterov=True),
    ),
    "RAdam": OptaxRule(
        "optax.radam",
        lambda n: optax.scale_by_radam(n["betas[0]"], n["betas[1]"], n["eps"]),
    ),
    "Rprop": OptaxRule(
        "optax.rprop",
        lambda n: optax.chain(
            optax.scale_by_rprop(n["lr"], n["etas[0]"], n["etas[1]"], n["step_sizes[0]"], n["step_sizes[1]"]),
            optax.scale(1 / n["lr"]),
        ),
    ),
}


def optax_rule(evidence: OptimizerEvidence, program: OptimizerProgram) -> Hypothesis | None:
    """Return the hypothesis that the port has Optax's optimizer of torch's name, with torch's options.

    None for optimizers without another rule, and for groups of parameters with different options.
    """
    rule = RULES.get(program.kind)
    if rule is None or program.classes.any() or not program.used.all():
        return None
    numbers = {"lr": float(program.lr[0, 0]), **{name: float(column[0, 0]) for name, column in program.options.items()}}
    decay = optax.add_decayed_weights(numbers.get("weight_decay", 0.0))
    worst = 0.0
    with jax.enable_x64(True):
        transformation = optax.chain(decay, rule.direction(numbers))
        state: Any = None
        for index in range(len(evidence.steps)):
            step = evidence.steps[index]
            params = {name: jnp.asarray(step.params[name], jnp.float64) for name in program.names}
            share = float(program.shares[index])
            gradients = {name: jnp.asarray(share * step.gradient(name), jnp.float64) for name in program.names}
            state = transformation.init(params) if state is None else state
            directions, state = transformation.update(gradients, state, params)
            rate = float(program.lr[index, 0])
            predicted = {name: -rate * np.asarray(x) for name, x in directions.items()}
            worst = max(worst, *residuals(step.update, predicted).values())
    return Hypothesis((Deviation("optax_rule", Statement("optax_rule", function=rule.name)),), worst)
