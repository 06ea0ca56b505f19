"""Compare the rates of a torch scheduler and of an optax chain to the end of the schedule, and beyond."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from jax import numpy as jnp
from torch.optim import SGD, Adam, AdamW
from torch.optim import lr_scheduler as schedulers

from jaxddp import optim
from jaxddp.config import TrainerConfig
from jaxddp.errors import InputError
from jaxddp.optim import schedules as optim_schedules
from jaxddp.parity import rates as in_rates
from jaxddp.parity.cases import PortCase
from jaxddp.parity.command import CheckOptions
from jaxddp.parity.coverage import Trial
from jaxddp.parity.port import Port
from jaxddp.parity.rate_curves import UPDATE, RatesComparison
from jaxddp.parity.report.coverage_words import beyond_line
from jaxddp.parity.report.sentences import sentence, sentences
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


def port(torch_optimizer: Any, torch_scheduler: Any, jax_optimizer: Any, **fields: Any) -> Port:
    losses = {"torch_loss": lambda model, batch: (model(batch["x"]) ** 2).mean()}
    losses["jax_loss"] = losses["torch_loss"]
    both = {"torch_optimizer": torch_optimizer, "torch_scheduler": torch_scheduler, "jax_optimizer": jax_optimizer}
    return Port(
        **both
        | losses
        | {
            "torch_model": lambda: torch.nn.Linear(3, 2),
            "jax_model": lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0)),
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


def test_a_schedule_of_the_port_in_float32_is_rounded_and_no_other() -> None:
    decays = sgd, lambda o: schedulers.ExponentialLR(o, 0.9999)
    assert compared(port(*decays, optax.sgd(lambda t: jnp.float32(LR) * jnp.float32(0.9999) ** t, 0.9))).after is None
    assert compared(port(*decays, optax.sgd(lambda t: LR * 0.99990002**t, 0.9))).after is not None


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
    torch_optimizer, scheduler, jax_optimizer = case
    if jax_optimizer is None:
        jax_optimizer = optax.sgd(
            optax.join_schedules([optax.constant_schedule(LR), optax.linear_schedule(LR / 10, LR, 51)], [50]), 0.9
        )
    result = compared(port(torch_optimizer, scheduler, jax_optimizer))
    assert result.within is not None
    step, of_torch, of_jax = expected
    assert result.within.quantity == "learning rate"
    assert (result.within.step, result.within.torch, result.within.jax) == pytest.approx(
        (step, of_torch, of_jax), rel=1e-2
    )


def by_dimension(params: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "vector", params)


def two_groups(parameters: Any) -> AdamW:
    matrix, vector = parameters
    return AdamW([{"params": [matrix], "lr": LR}, {"params": [vector], "lr": LR / 10, "weight_decay": 0.0}])


def drop(lr: float, at: int) -> Callable[[Any], Any]:
    return optax.piecewise_constant_schedule(lr, {at: 0.1})


def drops_at_70(optimizer: Any) -> Any:
    return schedulers.MultiStepLR(optimizer, [70])


@pytest.mark.parametrize("step", [70, 71])
def test_each_group_has_its_own_rate(step: int) -> None:
    of_groups = {"matrix": optax.adamw(drop(LR, 70), weight_decay=0.01), "vector": optax.adam(drop(LR / 10, step))}
    within = compared(port(two_groups, drops_at_70, optax.partition(of_groups, by_dimension))).within
    assert (within is None) == (step == 70)
    if within is not None:
        says = "the learning rate of bias differs first at step 70: 0.001 in torch, 0.01 in jax"
        assert sentence(within.statement(several=True)) == says


@pytest.mark.parametrize("every", [10, 11])
def test_optax_multisteps_counts_its_updates(every: int) -> None:
    inner = optax.MultiSteps(optax.sgd(lambda t: LR * 0.1 ** jnp.minimum(1, t // every), 0.9), 4)
    within = compared(port(sgd, lambda o: schedulers.MultiStepLR(o, [40]), inner.gradient_transformation())).within
    assert (within and within.step) == (None if every == 10 else 43)  # the first update after 40


@pytest.mark.parametrize("step", [70, 71])
@pytest.mark.parametrize("reads_state", [False, True], ids=["a chain", "the state's step"])
def test_a_jax_step_is_evaluated_as_a_whole(step: int, reads_state: bool) -> None:
    def jax_step(loss: Any, optimizer: Any, state: Any, batch: Any) -> Any:
        gradients = jax.grad(loss, has_aux=True)(state.params, state.buffers, batch)[0]
        updates, opt_state = optimizer.update(jax.lax.pmean(gradients, "replica"), state.opt_state, state.params)
        rate = -drop(LR, step)(state.step) if reads_state else 1.0
        params = jax.tree.map(lambda p, u: p + rate * u, state.params, updates)
        return replace(state, step=state.step + 1, params=params, opt_state=opt_state), {}

    optimizer = optax.scale_by_adam() if reads_state else optax.adam(drop(LR, step))
    within = compared(port(adam, drops_at_70, optimizer, jax_step=jax_step)).within
    assert (within and (within.step, within.jax)) == (None if step == 70 else (70, pytest.approx(LR)))


def one_cycle(optimizer: Any) -> Any:
    return schedulers.OneCycleLR(optimizer, LR, total_steps=100)


@pytest.mark.parametrize("shown", [False, True], ids=["jaxddp", "inject_hyperparams"])
@pytest.mark.parametrize("is_right", [True, False])
def test_the_momentum_of_one_cycle_is_compared(shown: bool, is_right: bool) -> None:
    lr, right = optim_schedules.one_cycle(LR, 100), optim_schedules.one_cycle_momentum(100)
    beta = right if is_right else lambda t: jnp.where(t > 50, 0.9, right(t))
    optimizer = optax.inject_hyperparams(optax.adam)(lr, b1=beta) if shown else optim.adam(lr, (beta, 0.999))
    result = compared(port(adam, one_cycle, optimizer))
    assert result.why_not == [] and result.after is None
    assert (result.within and result.within.step) == (None if is_right else 51)


@pytest.mark.parametrize("drops", [50, None], ids=["torch has a schedule", "torch has none"])
def test_a_decay_with_a_schedule_of_its_own_is_found(drops: int | None) -> None:
    decay = optax.add_decayed_weights(lambda t: jnp.where(t < 40, 0.01, 0.0))
    rate = optax.scale_by_learning_rate(LR if drops is None else drop(LR, drops))
    scheduler = None if drops is None else (lambda o: schedulers.MultiStepLR(o, [drops]))
    result = compared(port(lambda p: AdamW(p, LR), scheduler, optax.chain(optax.scale_by_adam(), decay, rate)))
    found = result.after if drops is None else result.within
    assert found is not None and (found.step, found.quantity) == (40, UPDATE)


class OwnState(NamedTuple):
    """State of an Adam of one's own."""

    count: Any
    mu: Any
    nu: Any


def own_adam(rate: Callable[[Any], Any]) -> optax.GradientTransformation:
    def init(params: Any) -> OwnState:
        return OwnState(jnp.zeros([], jnp.int32), *[jax.tree.map(jnp.zeros_like, params)] * 2)

    def update(gradients: Any, state: OwnState, params: Any = None) -> Any:
        t = state.count + 1
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mu, gradients)
        nu = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state.nu, gradients)
        root = jax.tree.map(lambda v: jnp.sqrt(v / (1 - 0.999**t)) + 1e-8, nu)
        return jax.tree.map(lambda m, r: -rate(state.count) * m / (1 - 0.9**t) / r, mu, root), OwnState(t, mu, nu)

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("step", [5000, 5003])
def test_an_optimizer_of_ones_own_is_compared_at_chosen_steps(step: int) -> None:
    result = compared(port(adam, lambda o: schedulers.MultiStepLR(o, [5000]), own_adam(drop(LR, step))))
    assert result.why_not == []
    assert (result.within and result.within.step) == (None if step == 5000 else 5000)


def test_a_cosine_that_stays_at_0_is_beyond() -> None:
    cosines = lambda o: schedulers.CosineAnnealingLR(o, 100), optax.sgd(optax.cosine_decay_schedule(LR, 100), 0.9)
    result = compared(port(sgd, *cosines))
    assert result.within is None and result.after is not None and result.after.step == 101


@pytest.mark.parametrize("total", [None, 6000])
def test_a_schedule_of_jax_alone_has_the_length_that_is_given(total: int | None) -> None:
    result = compared(port(adam, None, optax.adam(drop(LR, 5000))), total_steps=total)
    first = result.after if total is None else result.within
    assert first is not None and first.step == 5000
    assert total is not None or result.within is None


@pytest.mark.parametrize("late", [0, 1])
def test_a_scheduler_of_lightning_advances_by_epochs(late: int) -> None:
    def configure_optimizers(model: Any) -> Any:
        optimizer = adam(model.parameters())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedulers.StepLR(optimizer, 3)}}

    fields = {"configure_optimizers": configure_optimizers, "steps_per_epoch": 7, "total_steps": 70}
    within = compared(port(None, None, optax.adam(lambda t: LR * 0.1 ** (t // (21 + late))), **fields)).within
    assert (within and within.step) == (21 if late else None)


@pytest.mark.parametrize("schedule", ["cosine", "warmup_cosine", "one_cycle"])
def test_a_schedule_of_jaxddps_own_ends_with_the_run(schedule: str) -> None:
    config = TrainerConfig(optimizer="adam", schedule=schedule, lr=LR)
    result = compared(port(None, None, None, optimizer=config, total_steps=200))
    assert (result.last, result.within, result.after, result.why_not) == (199, None, None, [])


def test_a_plateau_is_not_followed() -> None:
    (rates,) = Sides().do(ReadTorchRates(Made(port(sgd, schedulers.ReduceLROnPlateau, optax.sgd(LR, 0.9))), 10))
    assert rates.why_not == "torch's ReduceLROnPlateau follows a metric, not the step"


def reported(of: Port, rates_of_run: float = LR) -> in_rates.Rates:
    """Return what a check says of a run in which torch has the same rate at all steps."""
    torch.manual_seed(0)
    start = {name: x.double().numpy() for name, x in of.torch_model().state_dict().items()}
    records = [SimpleNamespace(notes={"groups": [{"lr": rates_of_run}]})] * 10
    evidence = SimpleNamespace(judgement=SimpleNamespace(first={}))
    run: Any = SimpleNamespace(
        problems=[], jax=records, torch=records, evidence=lambda: evidence, start=start, case=PortCase(Made(of), 1)
    )
    sides: Any = Sides()
    return in_rates.compare_rates(run, sides, None)


def test_a_difference_has_values_and_the_line_of_the_scheduler() -> None:
    rates = reported(port(sgd, lambda o: schedulers.MultiStepLR(o, [500]), optax.sgd(drop(LR, 600), 0.9)))
    ((difference,), aspect) = rates.differences, rates.aspects["rates"]
    assert (difference.stage, difference.step, aspect.verdict) == ("rates", 500, "differs")
    assert difference.cause is not None and difference.cause.torch is not None
    assert "MultiStepLR(o, [500])" in difference.cause.torch.itself
    assert sentences(difference.cause) == ("the learning rate differs first at step 500: 0.01 in torch, 0.1 in jax",)


def test_a_rate_beyond_the_schedule_is_one_line() -> None:
    flat = schedulers.MultiStepLR
    rates = reported(
        port(
            sgd,
            lambda o: flat(o, [500]),
            optax.sgd(optax.join_schedules([drop(LR, 500), optax.constant_schedule(LR)], [700]), 0.9),
        )
    )
    (beyond,) = rates.beyond
    assert rates.aspects["rates"].verdict == "equal" and rates.trials == (Trial("rates", "after step 500"),)
    line = "beyond this run, after step 500: the rates differ, residual 0.9: "
    assert beyond_line(beyond).startswith(f"{line}the learning rate differs first at step 700: 0.01 in torch, 0.1 in")


def test_rates_that_no_step_changes_are_constant() -> None:
    rates = reported(port(adam, None, optax.adam(LR)))
    assert (rates.aspects["rates"].verdict, rates.aspects["rates"].says, rates.trials) == ("equal", (), ())


def test_a_scheduler_that_reads_another_state_is_not_followed() -> None:
    rates = reported(port(sgd, lambda o: schedulers.LambdaLR(o, lambda t: 0.5), optax.sgd(LR)))
    assert "gives other rates than in the run, first at step 0" in rates.aspects["rates"].says[0]


def test_the_flag_is_a_number_of_steps() -> None:
    with pytest.raises(InputError, match="--total-steps 0: must be at least 1"):
        CheckOptions(total_steps=0)
