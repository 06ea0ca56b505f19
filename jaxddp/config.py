"""Every knob of a training run, declared once and validated once.

The same configuration drives `python -m jaxddp.train` and `python -m torch_ref.train`, so
this module knows neither jax nor torch.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

from jaxddp.choices import BELONGS_TO, DEFAULT_LR, KEPT_ON_RESUME, OPTIMIZER_OPTIONS, POWER_SGD
from jaxddp.config_checks import check_combinations, check_names, check_ranges, flag, typed
from jaxddp.errors import InputError


@dataclass(frozen=True)
class TrainConfig:
    """Data-parallel training: one replica of the model per device, gradients averaged.

    Flags left out keep PyTorch's defaults. The same flags work for jaxddp.train and
    torch_ref.train. --traceback shows where in the code an error came from.
    """

    # What is learned.
    dataset: str = "digits"
    """digits | linear | names | npz."""
    data_path: str | None = None
    """names: a text file with one name per line. npz: a file with x_train, y_train, x_test, y_test."""
    num_examples: int = 1000
    """linear: number of training examples."""
    num_features: int = 10
    """linear: length of an input vector."""
    num_classes: int = 3
    """linear: number of labels."""
    context_length: int = 3
    """names: how many characters predict the next one."""

    # The model.
    model: str = "mlp"
    """linear | mlp | char_mlp | convnet."""
    hidden_sizes: tuple[int, ...] | None = None
    """Hidden widths (convnet: channels per stage). None: the model's own (mlp 128 128,
    char_mlp 64, convnet 16 32)."""
    embedding_size: int = 10
    """char_mlp: length of a character's vector."""
    dropout: float = 0.0
    """Share of hidden activations that training sets to zero, the others growing by 1 / (1 - share) instead."""
    dropout_masks: str = "replica"
    """replica | shared | example: each replica draws its own masks, all the same, or each example its own by its place
    in the global batch, whatever the number of replicas."""
    sync_batch_norm: bool = False
    """BatchNorm statistics over all replicas instead of each replica's own."""
    buffers: str = "rank0"
    """rank0 | mean | local: whose running statistics go on: rank 0's, as DDP's, their mean, or each its own."""
    weights: str | None = None
    """Start from this .safetensors file (torch's tensor names) instead of torch's initial weights."""

    # The optimizer. None: torch's default.
    optimizer: str = "adam"
    """sgd | adam | adamw | adagrad | rmsprop."""
    lr: float | None = None
    """Learning rate."""
    lr_scaling: str = "none"
    """none | linear | sqrt: the rate as it is, times the replicas, or times their square root."""
    momentum: float | None = None
    """sgd, rmsprop."""
    dampening: float | None = None
    """sgd."""
    nesterov: bool = False
    """sgd."""
    weight_decay: float | None = None
    """L2 penalty; adamw: decoupled decay."""
    betas: tuple[float, float] | None = None
    """adam, adamw."""
    eps: float | None = None
    """adam, adamw, adagrad, rmsprop."""
    amsgrad: bool = False
    """adam, adamw."""
    alpha: float | None = None
    """rmsprop: decay of the squared average."""
    centered: bool = False
    """rmsprop."""
    lr_decay: float | None = None
    """adagrad."""
    initial_accumulator_value: float | None = None
    """adagrad."""
    shard_optimizer: bool = False
    """Each replica keeps and updates one N-th of the optimizer's state (ZeRO, torch's ZeroRedundancyOptimizer)."""

    # The learning rate over time, counted in optimizer steps.
    schedule: str = "constant"
    """constant | step | warmup_cosine | one_cycle."""
    step_size: int = 100
    """step: optimizer steps between two decays."""
    gamma: float = 0.1
    """step: factor of each decay."""
    warmup_steps: int = 0
    """warmup_cosine: optimizer steps of linear warm-up from a third of the rate."""
    min_lr: float = 0.0
    """warmup_cosine: rate at the end."""
    cycle_momentum: bool = True
    """one_cycle: let momentum (Adam: beta1) run against the rate, as torch does."""

    # The step.
    epochs: int = 30
    """Passes over the training set."""
    global_batch_size: int = 32
    """Examples per optimizer step, over all replicas and micro-batches; must be divisible by
    replicas x accumulation steps."""
    accumulation_steps: int = 1
    """Micro-batches per replica and optimizer step; one all-reduce for all of them."""
    loss_normalization: str = "ddp"
    """ddp: mean of the replicas' means, as torch DDP. global: sum over all valid elements / their number."""
    comm_hook: str = "allreduce"
    """allreduce | bf16_compress | fp16_compress | powerSGD | batched_powerSGD: how gradients travel."""
    matrix_approximation_rank: int = 1
    """powerSGD, batched_powerSGD: columns of the two matrices that are sent for one."""
    start_power_sgd_iter: int = 1000
    """powerSGD, batched_powerSGD: optimizer steps before that, which send whole gradients."""
    min_compression_rate: float = 2.0
    """powerSGD: compress a tensor if it makes more than so many times fewer numbers."""
    use_error_feedback: bool = True
    """powerSGD, batched_powerSGD: add what was not sent to the next step's gradients."""
    warm_start: bool = True
    """powerSGD, batched_powerSGD: go on from the matrices of the step before instead of random ones."""
    clip_grad_norm: float | None = None
    """Clip the averaged gradient to this global norm."""
    ema_decay: float | None = None
    """Keep a moving average of the parameters with this decay; it is evaluated and saved beside them."""
    freeze: tuple[str, ...] = ()
    """Patterns of torch's names of parameters that do not learn: 'layers.0.*' '*.bias'."""
    log_gradients: tuple[str, ...] = ()
    """Patterns of torch's names of parameters whose gradients are logged: norms each step, histograms each epoch."""
    detect_anomaly: bool = False
    """Find the first parameter and the replica of a gradient that is NaN or infinite, and stop there."""
    shuffle: bool = True
    """Shuffle each epoch."""
    drop_last: bool = False
    """Drop the examples that do not fill all replicas instead of repeating the first ones."""
    drop_last_batch: bool = False
    """Leave out an epoch's last step where it is smaller than the others (DataLoader's drop_last)."""
    join: bool = False
    """Use each example once an epoch: replicas that have run out of them go along with nothing, as by DDP's join."""
    divide_by_initial_world_size: bool = True
    """join: average over all replicas; otherwise over those that still have examples."""
    seed: int = 0
    """Initial weights and sample order; the same numbers as torch draws for it."""
    dtype: str = "float32"
    """float32 | float64."""
    amp: str = "none"
    """none | bf16 | fp16: what matrix products and convolutions are computed in; the rest stays in float32."""
    init_scale: float = 65536.0
    """fp16: what the loss is multiplied by at first."""
    growth_factor: float = 2.0
    """fp16: what the scale is multiplied by after --growth-interval good steps."""
    backoff_factor: float = 0.5
    """fp16: what the scale is multiplied by where a gradient overflows; the step is skipped."""
    growth_interval: int = 2000
    """fp16: good steps in a row after which the scale grows."""

    # Where it runs.
    devices: int | None = None
    """Number of replicas. None: all local GPUs, or 2 CPU devices."""
    platform: str | None = None
    """cpu | gpu. None: GPUs where there are any."""
    steps_per_dispatch: int | None = None
    """Optimizer steps compiled into one program call (jaxddp only; the numbers do not change).
    None: up to 32 or --verify-every, or 1 for the convnet on CPU, where loops around convolutions are slow."""
    verify_every: int = 1000
    """Optimizer steps between two checks that all replicas are identical, each at the end of the
    program call that it falls into; 0: only at start and end."""

    # What stays.
    output: str | None = None
    """Run folder for config, metrics, curves, weights and checkpoints."""
    resume: str | None = None
    """Continue the run in this folder; flags beside it override its config, but for model, data and order."""
    checkpoint_every: int = 5
    """Epochs between two checkpoints in the run folder; 0: only at the end."""
    print_shards: bool = False
    """Print which example goes to which replica in each step, and stop."""

    def __post_init__(self) -> None:
        check_names(self)
        check_ranges(self)
        check_combinations(self)

    def optimizer_options(self) -> dict[str, Any]:
        """The optimizer options that were set, under torch's names; the rest keep torch's defaults.

        >>> TrainConfig(optimizer="sgd", lr=0.1, nesterov=True, momentum=0.9).optimizer_options()
        {'lr': 0.1, 'momentum': 0.9, 'nesterov': True}
        """
        values = {name: getattr(self, name) for name in OPTIMIZER_OPTIONS}
        return {name: value for name, value in values.items() if value is not None and value is not False}

    def power_sgd_options(self) -> dict[str, Any]:
        """What the PowerSGD hook is made with, the one that `comm_hook` names.

        >>> TrainConfig(comm_hook="batched_powerSGD", warm_start=False).power_sgd_options()["warm_start"]
        False
        """
        takers = BELONGS_TO["comm_hook"]
        return {name: getattr(self, name) for name in takers if self.comm_hook in takers[name]}

    @property
    def base_lr(self) -> float:
        """The learning rate that the schedule scales (one_cycle: its peak)."""
        return DEFAULT_LR[self.optimizer] if self.lr is None else self.lr

    def with_scaled_lr(self, world_size: int) -> Self:
        """The same with the rate that `lr_scaling` makes of it for so many replicas.

        >>> TrainConfig(lr=0.1, lr_scaling="sqrt").with_scaled_lr(4).lr
        0.2
        """
        factor = {"none": 1.0, "linear": world_size, "sqrt": math.sqrt(world_size)}[self.lr_scaling]
        return replace(self, lr=self.base_lr * factor, lr_scaling="none")

    def per_replica_batch_size(self, world_size: int) -> int:
        """Examples of one replica and optimizer step; `InputError` if replicas do not divide the batch."""
        parts = world_size * self.accumulation_steps
        if self.global_batch_size % parts:
            lower = self.global_batch_size // parts * parts
            near = f"{lower} or {lower + parts}" if lower else f"{parts}"
            raise InputError(
                f"--global-batch-size {self.global_batch_size}: {world_size} replicas x "
                f"{self.accumulation_steps} accumulation steps do not divide it; {near} would do"
            )
        return self.global_batch_size // world_size

    def check_used(self, beside: "TrainConfig") -> None:
        """Raise `InputError` for an option that is not as in `beside` and yet would change nothing."""
        for choice, options in BELONGS_TO.items():
            for option, takers in options.items():
                value, chosen = getattr(self, option), getattr(self, choice)
                if value != getattr(beside, option) and chosen not in takers:
                    some = " or ".join(filter(None, [", ".join(takers[:-1]), takers[-1]]))
                    raise InputError(f"{typed(option, value)}: only for {flag(choice)} {some}, not {chosen}")

    def check_resumes(self, saved: "TrainConfig") -> None:
        """Raise `InputError` if this run cannot go on from a checkpoint of `saved`."""
        stateful = {self.comm_hook, saved.comm_hook} & set(POWER_SGD)
        for name in (*KEPT_ON_RESUME, *(("comm_hook",) if stateful else ())):
            new, old = getattr(self, name), getattr(saved, name)
            if new != old:
                before = "its default" if old is None else typed(name, old)
                raise InputError(f"{typed(name, new)}: the run in {self.resume} goes on with {before} only")
        own = ["buffers"] * (self.buffers == "local") + ["errors of its --comm-hook"] * bool(stateful)
        if own and self.devices != saved.devices:
            raise InputError(
                f"{typed('devices', self.devices)}: the run in {self.resume} has {own[0]} of "
                f"{saved.devices} replicas, each its own; must be {saved.devices}"
            )
