"""Compare the rates of a torch scheduler and of an optax chain to the end of the schedule, and beyond."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from jax import numpy as jnp
from torch.optim import SGD, Adam, AdamW
from torch.optim import lr_scheduler as schedulers

from jaxddp.parity import rates as in_rates
from jaxddp.parity.cases import PortCase
from jaxddp.parity.port import Port
from jaxddp.parity.rate_curves import RatesComparison
from jaxddp.parity.torch_side.rates import ReadTorchRates
from torch_ref.distributed import World

LR = 0.1


@dataclass(frozen=True)
class Made:
    """A source of a port that is made in this process."""

    made: Port
    name: str = "port"

    def port(self) -> Port:
        """Return the port."""
        return self.made

    def __hash__(self) -> int:
        return id(self.made)


def port(torch_optimizer: Any, torch_scheduler: Any, flax_optimizer: Any, **fields: Any) -> Port:
    losses = {"torch_loss": lambda model, batch: model(batch["x"]).square().mean()}
    losses["flax_loss"] = losses["torch_loss"]
    both = {"torch_optimizer": torch_optimizer, "torch_scheduler": torch_scheduler, "flax_optimizer": flax_optimizer}
    return Port(
        **both
        | losses
        | {
            "torch_model": lambda: torch.nn.Linear(3, 2),
            "flax_model": lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0)),
            "batch": lambda step, rank: {"x": np.random.default_rng((step, rank)).normal(size=(4, 3))},
        }
        | fields
    )


class Sides:
    """Both sides, whose jobs run in this process."""

    torch = property(lambda self: self)
    jax = SimpleNamespace(do=lambda job: job.run(lambda _: None))

    def do(self, job: Any) -> list[Any]:
        """Return the answer of a job of torch's only rank."""
        return [job.run(World(), lambda _: None)]


def compared(of: Port, steps: int = 10, total_steps: int | None = None) -> RatesComparison:
    torch.manual_seed(0)
    start = {name: x.double().numpy() for name, x in of.torch_model().state_dict().items()}
    (rates,) = Sides().do(ReadTorchRates(Made(of), steps, total_steps))
    assert not rates.why_not
    sides: Any = Sides()
    return in_rates.compared(PortCase(Made(of), 1, steps), start, sides, rates)


def sgd(parameters: Any) -> SGD:
    return SGD(parameters, lr=LR, momentum=0.9)


def adam(parameters: Any) -> Adam:
    return Adam(parameters, lr=LR)


def warmed_up(length: int) -> Callable[[Any], Any]:
    return optax.join_schedules([optax.linear_schedule(LR / 10, LR, length), optax.constant_schedule(LR)], [length])


def cosine(total: int) -> Callable[[Any], Any]:
    return lambda t: LR / 2 * (1 + jnp.cos(jnp.pi * t / total))


def of_warmup(optimizer: Any) -> Any:
    return schedulers.LinearLR(optimizer, 0.1, total_iters=50)


EQUAL: dict[str, tuple[Any, Any, Any]] = {
    "constant": (adam, None, optax.adam(LR)),
    "milestones": (
        sgd,
        lambda o: schedulers.MultiStepLR(o, [500, 800]),
        optax.sgd(optax.piecewise_constant_schedule(LR, {500: 0.1, 800: 0.1}), momentum=0.9),
    ),
    "warm-up": (adam, of_warmup, optax.adam(warmed_up(50))),
    "a cosine that comes back": (sgd, lambda o: schedulers.CosineAnnealingLR(o, 100), optax.sgd(cosine(100), 0.9)),
    "warm-up from 0, then a cosine": (
        lambda p: AdamW(p, lr=LR),
        lambda o: schedulers.LambdaLR(
            o, lambda t: t / 30 if t < 30 else (1 + np.cos(np.pi * min(1.0, (t - 30) / 70))) / 2
        ),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, LR, 30, 100), weight_decay=0.01),
    ),
    "two schedules in a chain": (
        sgd,
        lambda o: schedulers.ChainedScheduler([of_warmup(o), schedulers.StepLR(o, 400)]),
        optax.chain(
            optax.trace(0.9),
            optax.scale_by_schedule(lambda t: 0.1 ** (t // 400)),
            optax.scale_by_learning_rate(warmed_up(50)),
        ),
    ),
    "shown by inject_hyperparams": (adam, of_warmup, optax.inject_hyperparams(optax.adam)(warmed_up(50))),
    "clipped before": (adam, of_warmup, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(warmed_up(50)))),
}


@pytest.mark.parametrize("case", EQUAL.values(), ids=EQUAL.keys())
def test_equal_schedules_are_equal_to_ten_times_their_length(case: tuple[Any, Any, Any]) -> None:
    result = compared(port(*case))
    assert (result.within, result.after, result.why_not) == (None, None, [])
    assert result.constant == (case[1] is None)
    assert result.worst[0] < 1e-12


def test_an_exponential_decay_in_float32_is_equal() -> None:
    decay = optax.exponential_decay(LR, 1, 0.9999)
    result = compared(
        port(sgd, lambda o: schedulers.ExponentialLR(o, 0.9999), optax.sgd(decay, 0.9)), total_steps=20_000
    )
    assert (result.within, result.after, result.why_not) == (None, None, [])


def late(t: Any) -> Any:
    return jnp.where(t < 99_998, LR, LR / 10)


WITHIN: dict[str, tuple[tuple[Any, Any, Any], tuple[int, float, float]]] = {
    "a milestone": (
        (
            sgd,
            lambda o: schedulers.MultiStepLR(o, [500, 800]),
            optax.sgd(optax.piecewise_constant_schedule(LR, {600: 0.1}), 0.9),
        ),
        (500, 0.01, 0.1),
    ),
    "a milestone late in training": (
        (adam, lambda o: schedulers.MultiStepLR(o, [99_999]), optax.adam(late)),
        (99_998, 0.1, 0.01),
    ),
    "a warm-up that is one step too long": (
        (sgd, lambda o: schedulers.SequentialLR(o, [schedulers.ConstantLR(o, 1.0, 50), of_warmup(o)], [50]), None),
        (51, 0.0118, 0.01176),
    ),
    "a constant in jax": ((adam, lambda o: schedulers.MultiStepLR(o, [60]), optax.adam(LR)), (60, 0.01, 0.1)),
}


@pytest.mark.parametrize(("case", "expected"), WITHIN.values(), ids=WITHIN.keys())
def test_a_difference_before_the_end_is_found_at_its_step(case: Any, expected: tuple[int, float, float]) -> None:
    torch_optimizer, scheduler, flax_optimizer = case
    if flax_optimizer is None:
        flax_optimizer = optax.sgd(
            optax.join_schedules([optax.constant_schedule(LR), optax.linear_schedule(LR / 10, LR, 51)], [50]), 0.9
        )
    result = compared(port(torch_optimizer, scheduler, flax_optimizer))
    assert result.within is not None
    step, of_torch, of_jax = expected
    assert result.within.quantity == "learning rate"
    assert (result.within.step, result.within.torch, result.within.jax) == pytest.approx(
        (step, of_torch, of_jax), rel=1e-2
    )
