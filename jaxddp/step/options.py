"""The options of a replica step: what they are, which of them go together, and what a configuration says of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxddp import comm_hooks
from jaxddp.comm_hooks import CommHook
from jaxddp.config import TrainConfig
from jaxddp.config.checks import check_combines_with_local_sgd
from jaxddp.config.choices import BUFFERS, LOSS_NORMALIZATIONS
from jaxddp.config.ranges import check_range
from jaxddp.distributed.collectives import all_reduce_mean
from jaxddp.errors import InputError, check_name
from jaxddp.nn.functional import Functional
from jaxddp.nn.torch_weights import frozen_params, named_params
from jaxddp.state import Params
from jaxddp.step import grad_scaler, post_local_sgd
from jaxddp.step.grad_scaler import GradScaler
from jaxddp.step.gradient_hooks import GradientHook
from jaxddp.step.post_local_sgd import PostLocalSGD


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What a `jaxddp.step.replica_step.ReplicaStep` can be told, and `jaxddp.DataParallel` with it.

    Attributes:
        loss_normalization: "ddp" or "global".
        clip_grad_norm: largest global norm of the averaged gradient; None: no clipping.
        comm_hook: what happens to the local gradients between replicas, see `jaxddp.comm_hooks`; a function
            of them, or a `CommHook`. By default their mean.
        keep_buffers: what goes on of the buffers that the replicas' forward passes leave: "rank0": those of
            rank 0, as DDP's; "mean": their mean, where they are no integers; "local": each its own.
        ema_decay: of the moving average of the parameters; None: none is kept.
        frozen: patterns of the names of parameters that do not learn (`fnmatch`'s: "encoder.*").
        find_unused_parameters: whether there may be parameters that the loss does not depend on. False: they are
            an error. True: they stay as they are, as with torch's DDP. None: nobody looks for them, and the
            optimizer is given zeros for their gradients, which is what `jax.grad` makes of them.
        gradient_hooks: functions of chosen gradients, before or after their mean, see `jaxddp.step.gradient_hooks`.
        shard_optimizer: each replica keeps one N-th of the optimizer's state, and updates as much, see
            `jaxddp.step.zero`; the optimizer must treat every element alike.
        divide_by_initial_world_size: whether W counts replicas without examples too, as by torch's `join`.
        scaler: scales the loss, and skips steps whose gradients overflow; None: neither.
        log_gradients: patterns of the names of parameters whose gradients are among the metrics.
        detect_anomaly: the metrics say which gradients of which replica are not finite. Of both, see
            `jaxddp.tracking.gradient_metrics`.
        local_sgd: when replicas step on their own, see `jaxddp.step.post_local_sgd`; None: never.

    Raises:
        InputError: an unknown choice, one that does not go with another, or a number out of its range.
    """

    loss_normalization: str = "ddp"
    clip_grad_norm: float | None = None
    comm_hook: CommHook | Callable[[Params], Params] = all_reduce_mean
    keep_buffers: str = "rank0"
    ema_decay: float | None = None
    frozen: tuple[str, ...] = ()
    find_unused_parameters: bool | None = False
    gradient_hooks: tuple[GradientHook, ...] = ()
    shard_optimizer: bool = False
    divide_by_initial_world_size: bool = True
    scaler: GradScaler | None = None
    log_gradients: tuple[str, ...] = ()
    detect_anomaly: bool = False
    local_sgd: PostLocalSGD | None = None

    def __post_init__(self) -> None:
        check_name("loss_normalization", self.loss_normalization, LOSS_NORMALIZATIONS)
        check_name("keep_buffers", self.keep_buffers, BUFFERS)
        check_range("clip_grad_norm", self.clip_grad_norm)
        check_range("ema_decay", self.ema_decay)
        if self.shard_optimizer and self.find_unused_parameters:
            raise InputError("shard_optimizer: a slice has something of every parameter; freeze those that are unused")
        if self.shard_optimizer and any(hook.when == "mean" for hook in self.gradient_hooks):
            raise InputError('shard_optimizer: no replica has the mean of a whole gradient; hooks must be "local"')
        if self.local_sgd is not None:
            check_combines_with_local_sgd(self, "local_sgd")


def options(config: TrainConfig, model: nnx.Module) -> dict[str, Any]:
    """What `config` says of the `ReplicaStep` of this model, by the names of its attributes.

    Raises:
        InputError: `--freeze` names none of its parameters, or all, or `--log-gradients` none that learns; or
            `--matrix-approximation-rank` is too large for it.
    """
    params = Functional(model).params
    frozen = frozen_params(config.freeze, params)
    learning = [name for name in params if name not in frozen]
    config.check_square(sum(params[name].size for name in learning))
    return {
        "loss_normalization": config.loss_normalization,
        "clip_grad_norm": config.clip_grad_norm,
        "comm_hook": comm_hooks.from_config(config, model),
        "keep_buffers": config.buffers,
        "ema_decay": config.ema_decay,
        "frozen": frozen,
        "log_gradients": named_params("--log-gradients", config.log_gradients, learning),
        "detect_anomaly": config.detect_anomaly,
        "shard_optimizer": config.shard_optimizer,
        "divide_by_initial_world_size": config.divide_by_initial_world_size,
        "scaler": grad_scaler.from_config(config),
        "local_sgd": post_local_sgd.from_config(config),
    }
