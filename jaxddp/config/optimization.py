"""Options of the optimizer and of its learning-rate schedule: one field per flag, as in `jaxddp.config.options`."""

from dataclasses import dataclass
from typing import Literal

BasicOptimizer = Literal["sgd", "adam", "adamw", "adagrad", "rmsprop"]  # with which every model is compared
FurtherOptimizer = Literal["adadelta", "adamax", "asgd", "nadam", "radam", "rprop"]
FactorSchedule = Literal["constant", "step", "multi_step", "constant_factor", "linear", "exponential", "polynomial"]
CyclicSchedule = Literal["cosine", "cosine_restarts", "cyclic", "one_cycle", "warmup_cosine"]


@dataclass(frozen=True)
class Optimizer:
    """Optimizer, with torch's options. None: torch's."""

    optimizer: Literal[BasicOptimizer, FurtherOptimizer] = "adam"
    """Rule of the updates."""
    lr: float | None = None
    """Learning rate; rprop: size of the first step. None: the optimizer's own, adam 0.001."""
    maximize: bool = False
    """Maximize the loss instead of minimizing it."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply the learning rate by 1, by the world size, or by its square root."""
    momentum: float | None = None
    """sgd, rmsprop: momentum factor."""
    dampening: float | None = None
    """sgd: dampening of the momentum."""
    nesterov: bool = False
    """sgd: Nesterov momentum."""
    weight_decay: float | None = None
    """L2 penalty; adamw: decoupled weight decay."""
    decoupled_weight_decay: bool = False
    """nadam, radam: decoupled weight decay instead of an L2 penalty."""
    betas: tuple[float, float] | None = None
    """adam, adamw, adamax, nadam, radam: decay rates of the two moments."""
    momentum_decay: float | None = None
    """nadam: speed at which the momentum grows."""
    eps: float | None = None
    """All but sgd, asgd, rprop: term added to the denominator."""
    amsgrad: bool = False
    """adam, adamw: AMSGrad."""
    alpha: float | None = None
    """rmsprop: decay rate of the squared average. asgd: power by which the rate falls."""
    rho: float | None = None
    """adadelta: decay rate of the squared averages."""
    lambd: float | None = None
    """asgd: decay of the parameters."""
    t0: float | None = None
    """asgd: step from which parameters are averaged."""
    etas: tuple[float, float] | None = None
    """rprop: factors by which a step shrinks and grows."""
    step_sizes: tuple[float, float] | None = None
    """rprop: smallest and largest step."""
    centered: bool = False
    """rmsprop: normalize by an estimate of the gradient's variance."""
    lr_decay: float | None = None
    """adagrad: decay of the learning rate."""
    initial_accumulator_value: float | None = None
    """adagrad: initial value of the sum of squares."""


@dataclass(frozen=True)
class Schedule:
    """Learning-rate schedule, in optimizer steps."""

    schedule: Literal[FactorSchedule, CyclicSchedule, "plateau"] = "constant"
    """How the learning rate changes."""
    step_size: int = 100
    """step: optimizer steps between decays."""
    milestones: tuple[int, ...] = ()
    """multi_step: optimizer steps at which the learning rate decays."""
    gamma: float | None = None
    """step, multi_step, exponential: factor of a decay; cyclic, exp_range: of the height at each step. None: 0.1; 1."""
    factor: float | None = None
    """constant_factor: factor until --total-iters; plateau: factor of a reduction. None: 1/3; 0.1."""
    start_factor: float = 1 / 3
    """linear: first factor of the learning rate."""
    end_factor: float = 1.0
    """linear: factor at --total-iters."""
    total_iters: int = 5
    """constant_factor, linear, polynomial: optimizer steps until the learning rate stays."""
    power: float = 1.0
    """polynomial: exponent."""
    t_max: int | None = None
    """cosine: optimizer steps to --min-lr, after which the rate rises again. None: those of the run."""
    t_0: int | None = None
    """cosine_restarts: optimizer steps to the first restart. None: must be given."""
    t_mult: int = 1
    """cosine_restarts: factor by which each cycle is longer than the one before."""
    warmup_steps: int = 0
    """warmup_cosine: steps of linear warm-up from a third of the learning rate."""
    min_lr: float = 0.0
    """cosine, cosine_restarts, warmup_cosine: learning rate at the end (torch's eta_min); plateau: the least."""
    max_lr: float | None = None
    """cyclic: highest learning rate; --lr is the lowest. None: must be given."""
    step_size_up: int = 2000
    """cyclic: optimizer steps of a rise."""
    step_size_down: int | None = None
    """cyclic: optimizer steps of a fall. None: --step-size-up."""
    cyclic_mode: Literal["triangular", "triangular2", "exp_range"] = "triangular"
    """cyclic: cycles alike, each half as high as the one before, or by --gamma (torch's mode)."""
    cycle_momentum: bool = True
    """cyclic, one_cycle: cycle the momentum (Adam: beta1) inversely to the learning rate, like torch."""
    pct_start: float = 0.3
    """one_cycle: share of the run in which the learning rate rises."""
    div_factor: float = 25.0
    """one_cycle: --lr over the first learning rate."""
    final_div_factor: float = 1e4
    """one_cycle: first learning rate over the last."""
    patience: int = 10
    """plateau: tests without a better --best-metric that the learning rate waits for."""
    threshold: float = 1e-4
    """plateau: least improvement that counts."""
    threshold_mode: Literal["rel", "abs"] = "rel"
    """plateau: whether --threshold is a share of the best value, or a difference."""
    cooldown: int = 0
    """plateau: tests after a reduction that count neither way."""
    swa_lr: float | None = None
    """Learning rate to which --swa-start goes from the one reached by then. None: the schedule continues."""
    anneal_epochs: int = 10
    """Epochs until --swa-lr is reached, along half a cosine."""
