"""Options of a training run: one field per flag, with its default and its help, in the groups of `--help`.

`jaxddp.config.ranges` and `jaxddp.config.checks` hold the rules for their values.
"""

from dataclasses import dataclass
from typing import Literal

from jaxddp.config.optimization import Optimizer, Schedule

Platform = Literal["cpu", "gpu"]


@dataclass(frozen=True)
class Data:
    """Training and test data."""

    dataset: Literal["digits", "linear", "names", "npz"] = "digits"
    """Handwritten digits, a synthetic linear problem, first names, or your arrays."""
    data_path: str | None = None
    """names: text file with one name per line. npz: file with x_train, y_train, x_test, y_test. None: names brings
    its list."""
    num_examples: int = 1000
    """linear: number of training examples."""
    num_features: int = 10
    """linear: number of input features."""
    num_classes: int = 3
    """linear: number of classes."""
    context_length: int = 3
    """names: number of characters from which the next one is predicted."""


@dataclass(frozen=True)
class Model:
    """Model."""

    model: Literal["linear", "mlp", "char_mlp", "convnet"] = "mlp"
    """Model to train."""
    hidden_sizes: tuple[int, ...] | None = None
    """Widths of the hidden layers; convnet: channels. None: mlp 128 128, char_mlp 64, convnet 16 32."""
    embedding_size: int = 10
    """char_mlp: size of a character embedding."""
    dropout: float = 0.0
    """Probability p of zeroing a hidden activation in training; the others are scaled by 1 / (1 - p)."""
    label_smoothing: float = 0.0
    """Share of each label that the loss of training, not that of a test, spreads over all classes."""


@dataclass(frozen=True)
class Parameters:
    """Initial weights, parameters that learn, and layers that depend on the other replicas."""

    weights: str | None = None
    """Initial weights from a .safetensors file with torch's tensor names. None: the model's."""
    weights_partial: str | None = None
    """Like --weights, but loads the tensors that fit by name and shape; a line lists what is left out on either side.
    None: the model's."""
    freeze: tuple[str, ...] = ()
    """Freeze the parameters whose torch names match a pattern: 'layers.0.*' '*.bias'."""
    dropout_masks: Literal["replica", "shared", "example"] = "replica"
    """Dropout masks per replica, the same for all replicas, or per example at any world size."""
    sync_batch_norm: bool = False
    """Compute BatchNorm statistics over all replicas instead of per replica."""


@dataclass(frozen=True)
class Step:
    """Training loop and optimizer step."""

    epochs: int = 30
    """Passes over the training set."""
    global_batch_size: int = 32
    """Examples per optimizer step over all replicas; a multiple of world size x accumulation steps."""
    accumulation_steps: int = 1
    """Micro-batches per replica and optimizer step, with one all-reduce."""
    loss_normalization: Literal["ddp", "global"] = "ddp"
    """Mean of the replicas' mean losses, like torch DDP, or mean over all valid elements."""
    clip_grad_norm: float | None = None
    """Maximum global norm of the averaged gradient. None: no clipping."""
    clip_grad_value: float | None = None
    """Largest absolute value of an element of the averaged gradient. None: no clipping."""
    remat: bool = False
    """Keep only the results of matrix products and convolutions for the backward pass, which recomputes the rest."""
    ema_decay: float | None = None
    """Decay of an exponential moving average of the parameters, also evaluated and saved. None: no average."""
    swa_start: int | None = None
    """Stochastic weight averaging: epochs before the first one whose parameters are averaged; the average is also
    tested, with its own BatchNorm statistics, and saved. None: off."""


@dataclass(frozen=True)
class OrderOptions:
    """Order of the examples and their distribution over the replicas."""

    shuffle: bool | str = True
    """Reshuffle the training set every epoch, like torch; index: in an order that takes no memory; --no-shuffle."""
    seed: int = 0
    """Seed of the initial weights and the sample order; both equal torch's for the same seed."""
    drop_last: bool = False
    """Even out the replicas by dropping examples instead of repeating some (DistributedSampler's drop_last)."""
    drop_last_batch: bool = False
    """Skip the last step of an epoch if its batch is incomplete (DataLoader's drop_last)."""
    join: bool = False
    """Use each example exactly once per epoch, though replicas get unequal numbers (DDP's join)."""
    divide_by_initial_world_size: bool = True
    """join: average over all replicas instead of those that still have examples."""
    steps_per_epoch: int | None = None
    """Optimizer steps per epoch; a stream of training examples needs it. None: as many as the data has."""
    data_workers: int = 0
    """Processes that read, augment and collate the examples. 0: the training process does."""
    verify_data: bool = False
    """Compare all contents of mapped files with those that a resumed run started with, instead of samples of them."""
    print_shards: bool = False
    """Print which example goes to which replica in each step, and exit."""


@dataclass(frozen=True)
class Communication:
    """Communication between replicas."""

    buffers: Literal["rank0", "mean", "local"] = "rank0"
    """Keep rank 0's BatchNorm statistics, like DDP, their mean, or each replica's."""
    comm_hook: Literal["allreduce", "bf16_compress", "fp16_compress", "powerSGD", "batched_powerSGD"] = "allreduce"
    """How gradients are averaged."""
    matrix_approximation_rank: int = 1
    """powerSGD, batched_powerSGD: rank of the approximation."""
    start_power_sgd_iter: int = 1000
    """powerSGD, batched_powerSGD: number of first steps with uncompressed gradients."""
    min_compression_rate: float = 2.0
    """powerSGD: compress only tensors that shrink by more than this factor."""
    use_error_feedback: bool = True
    """powerSGD, batched_powerSGD: add the approximation error to the next step's gradients."""
    warm_start: bool = True
    """powerSGD, batched_powerSGD: start from the previous step's factors instead of random ones."""
    start_local_sgd_iter: int | None = None
    """Post-local SGD: number of first steps that average gradients; later steps average parameters. None: off."""
    local_sgd_period: int | None = None
    """Post-local SGD: optimizer steps between averagings of the parameters. None: 4."""
    shard_optimizer: bool = False
    """Shard the optimizer state over the replicas (ZeRO, torch's ZeroRedundancyOptimizer)."""


@dataclass(frozen=True)
class Precision:
    """Floating-point precision."""

    dtype: Literal["float32", "float64"] = "float32"
    """Type of inputs, parameters and optimizer state."""
    amp: Literal["none", "bf16", "fp16"] = "none"
    """Type of matrix products and convolutions; the rest stays in float32."""
    init_scale: float = 65536.0
    """fp16: initial loss scale."""
    growth_factor: float = 2.0
    """fp16: factor on the loss scale after --growth-interval finite steps."""
    backoff_factor: float = 0.5
    """fp16: factor on the loss scale when a gradient overflows; the step is skipped."""
    growth_interval: int = 2000
    """fp16: consecutive finite steps after which the loss scale grows."""


@dataclass(frozen=True)
class Devices:
    """Devices and dispatch."""

    devices: int | None = None
    """Number of replicas over all processes, one per device. None: all GPUs, or 2 CPU devices."""
    platform: Platform | None = None
    """Kind of devices. None: gpu if there are any."""
    steps_per_dispatch: int | None = None
    """Optimizer steps per call of the compiled program; a convnet on CPU takes 1. None: up to 32."""
    stall_timeout: float = 600.0
    """Seconds after which a step, batch, test or checkpoint that has not ended ends the run. 0: never."""
    verify_every: int = 1000
    """Optimizer steps between checks that all replicas are identical. 0: only at start and end."""


@dataclass(frozen=True)
class Processes:
    """Several processes of one run. torchrun, srun, mpirun and JAX's variables need no flags."""

    coordinator: str | None = None
    """HOST:PORT on the machine of process 0; the port after it must be free too. None: as the launcher says."""
    num_processes: int | None = None
    """Number of processes. None: as the launcher says."""
    process_id: int | None = None
    """Number of this process, from 0. None: as the launcher says."""
    join_timeout: float = 300.0
    """Seconds to wait for all processes."""


@dataclass(frozen=True)
class Output:
    """Output, checkpoints and diagnostics."""

    output: str | None = None
    """Run folder for config, metrics, curves, weights and checkpoints. None: nothing is saved."""
    resume: str | None = None
    """Continue the run in this folder; further flags override its config, except for model, data and order. None: a new
    run."""
    checkpoint_every: int | str = 5
    """Time between checkpoints: 5 or 5epochs; 200steps, 10minutes (jaxddp only). 0: only at the end."""
    keep_checkpoints: int = 2
    """Number of newest checkpoints to keep."""
    keep_best: bool = False
    """Save the weights with the best --best-metric at a checkpoint too; jaxddp.train keeps that checkpoint."""
    best_metric: str = "loss"
    """Metric of the test by which --keep-best, --early-stopping-patience and --schedule plateau judge."""
    best_mode: Literal["min", "max"] = "min"
    """Direction in which --best-metric improves."""
    evaluate_every: int | str = 1
    """Time between tests: 1 or 1epoch; 200steps."""
    callback_every: int = 100
    """Optimizer steps between calls of a program's on_step_end."""
    early_stopping_patience: int | None = None
    """End the run after this many tests without a better --best-metric. None: never."""
    track: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """Where metrics go in addition to metrics.jsonl, in a run with --output."""
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    """If the loss is not finite, end the run, skip the update, or go back to a checkpoint (jaxddp only)."""
    on_drift: Literal["stop", "repair"] = "stop"
    """If replicas differ, end the run, or continue from the majority of them (jaxddp only)."""
    log_every: int | None = None
    """Optimizer steps between logged steps; epochs are all logged. None: 1 until step 400, 2 until 800, 4 until
    1,600, ...: at most 5,000 in a run."""
    log_gradients: tuple[str, ...] = ()
    """Log gradients of the parameters whose torch names match a pattern: norms per logged step,
    histograms of at most 250 epochs."""
    detect_anomaly: bool = False
    """Stop at the first gradient that is NaN or infinite, and report its parameter, replica and example."""


@dataclass(frozen=True)
class TrainerOptions(
    Output, Processes, Devices, Precision, Communication, OrderOptions, Step, Schedule, Optimizer, Parameters
):
    """Options of a training run that every program has, without checks."""


@dataclass(frozen=True)
class BuiltInOptions(Model, Data):
    """Options of the program that the trainers run if they are given no file: a classifier."""
