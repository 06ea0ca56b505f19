"""Every knob of a training run: its flag, its default and its help, in the groups that `--help` shows.

What may be combined is said in `jaxddp.config.checks`; this module knows neither jax nor torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Data:
    """What is learned."""

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


@dataclass(frozen=True)
class Model:
    """What learns it, and where it starts."""

    model: str = "mlp"
    """linear | mlp | char_mlp | convnet."""
    hidden_sizes: tuple[int, ...] | None = None
    """Hidden widths; convnet: channels. None: the model's own (mlp 128 128, char_mlp 64, convnet 16 32)."""
    embedding_size: int = 10
    """char_mlp: length of a character's vector."""
    dropout: float = 0.0
    """Share of hidden activations that training sets to zero, the others growing by 1 / (1 - share) instead."""
    dropout_masks: str = "replica"
    """replica | shared | example: each replica draws its own, all the same, or each example its own on any devices."""
    sync_batch_norm: bool = False
    """BatchNorm statistics over all replicas instead of each replica's own."""
    weights: str | None = None
    """Start from this .safetensors file (torch's tensor names) instead of torch's initial weights."""
    freeze: tuple[str, ...] = ()
    """Patterns of torch's names of parameters that do not learn: 'layers.0.*' '*.bias'."""


@dataclass(frozen=True)
class Optimizer:
    """What an update is made of. None: torch's default."""

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


@dataclass(frozen=True)
class Schedule:
    """The learning rate over time, counted in optimizer steps."""

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


@dataclass(frozen=True)
class Step:
    """An optimizer step."""

    epochs: int = 30
    """Passes over the training set."""
    global_batch_size: int = 32
    """Examples per optimizer step, of all replicas; must be divisible by replicas x accumulation steps."""
    accumulation_steps: int = 1
    """Micro-batches per replica and optimizer step; one all-reduce for all of them."""
    loss_normalization: str = "ddp"
    """ddp: mean of the replicas' means, as torch DDP. global: sum over all valid elements / their number."""
    clip_grad_norm: float | None = None
    """Clip the averaged gradient to this global norm."""
    ema_decay: float | None = None
    """Keep a moving average of the parameters with this decay; it is evaluated and saved beside them."""


@dataclass(frozen=True)
class Order:
    """Which replica sees which example when."""

    shuffle: bool = True
    """Shuffle each epoch."""
    seed: int = 0
    """Initial weights and sample order; the same numbers as torch draws for it."""
    drop_last: bool = False
    """Drop the examples that do not fill all replicas instead of repeating the first ones."""
    drop_last_batch: bool = False
    """Leave out an epoch's last step where it is smaller than the others (DataLoader's drop_last)."""
    join: bool = False
    """Use each example once an epoch: replicas that have run out of them go along with nothing, as by DDP's join."""
    divide_by_initial_world_size: bool = True
    """join: average over all replicas; otherwise over those that still have examples."""
    print_shards: bool = False
    """Print which example goes to which replica in each step, and stop."""


@dataclass(frozen=True)
class Communication:
    """What replicas tell each other, and what each has of its own."""

    buffers: str = "rank0"
    """rank0 | mean | local: whose running statistics go on: rank 0's, as DDP's, their mean, or each its own."""
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
    start_local_sgd_iter: int | None = None
    """After so many optimizer steps, replicas step on their own gradients, and average parameters (post-local SGD)."""
    local_sgd_period: int | None = None
    """--start-local-sgd-iter: optimizer steps between two averagings. None: 4."""
    shard_optimizer: bool = False
    """Each replica keeps and updates one N-th of the optimizer's state (ZeRO, torch's ZeroRedundancyOptimizer)."""


@dataclass(frozen=True)
class Precision:
    """How many digits there are."""

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


@dataclass(frozen=True)
class Devices:
    """Where it runs."""

    devices: int | None = None
    """Number of replicas. None: all local GPUs, or 2 CPU devices."""
    platform: str | None = None
    """cpu | gpu. None: GPUs where there are any."""
    steps_per_dispatch: int | None = None
    """Optimizer steps in one call of the program; jaxddp only. None: up to 32; 1 for the convnet on CPU."""
    verify_every: int = 1000
    """Optimizer steps between two checks that all replicas are identical; 0: only at start and end."""


@dataclass(frozen=True)
class Output:
    """What is shown, and what stays."""

    output: str | None = None
    """Run folder for config, metrics, curves, weights and checkpoints."""
    resume: str | None = None
    """Continue the run in this folder; flags beside it override its config, but for model, data and order."""
    checkpoint_every: int = 5
    """Epochs between two checkpoints in the run folder; 0: only at the end."""
    log_gradients: tuple[str, ...] = ()
    """Patterns of torch's names of parameters whose gradients are logged: norms each step, histograms each epoch."""
    detect_anomaly: bool = False
    """Find the first parameter and the replica of a gradient that is NaN or infinite, and stop there."""


@dataclass(frozen=True)
class TrainOptions(Output, Devices, Precision, Communication, Order, Step, Schedule, Optimizer, Model, Data):
    """All options of a training run, unchecked."""
