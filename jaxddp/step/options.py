"""Options of a replica step: their meaning, the checks of their combinations, and their values in a configuration."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

import jax
import optax

from jaxddp import comm_hooks
from jaxddp.comm_hooks import CommHook
from jaxddp.config import TrainerConfig
from jaxddp.config.checks import check_combines_with_local_sgd
from jaxddp.config.choices import BUFFERS, LOSS_NORMALIZATIONS
from jaxddp.config.ranges import check_range
from jaxddp.errors import InputError, check_name
from jaxddp.nn.any_model import AnyFunctional
from jaxddp.nn.torch_weights import frozen_params, named_params
from jaxddp.state import Params
from jaxddp.step import grad_scaler, post_local_sgd
from jaxddp.step.grad_scaler import GradScaler
from jaxddp.step.gradient_hooks import GradientHook
from jaxddp.step.post_local_sgd import PostLocalSGD


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of `jaxddp.step.replica_step.ReplicaStep`, and so of `jaxddp.DistributedDataParallel`.

    Attributes:
        loss_normalization: "ddp" or "global".
        clip_grad_norm: largest global norm of the averaged gradient; None: no clipping.
        clip_grad_value: largest absolute value of its elements; None: no clipping; not with `clip_grad_norm`.
        remat: keep only the results of products and convolutions for the backward pass, and compute the rest again.
        comm_hook: reduction of the local gradients, a function of them or a `CommHook`, see `jaxddp.comm_hooks`;
            None: their mean over the replicas.
        keep_buffers: buffers to keep after the replicas' forward passes. "rank0": those of rank 0, as DDP;
            "mean": their mean, in the buffer's dtype; "local": each replica its own.
        ema_decay: decay of the moving average of the parameters; None: no average is kept.
        swa: keep an equal average of the parameters, which `DistributedDataParallel.update_average` updates; not
            with `ema_decay`.
        frozen: patterns of the names of parameters that do not learn, as in `fnmatch` ("encoder.*").
        find_unused_parameters: treatment of parameters that the loss does not depend on. False: an error. True:
            they do not change, as in torch's DDP. None: no search; the optimizer gets zeros as their
            gradients, as `jax.grad` returns them.
        gradient_hooks: functions of chosen gradients, before or after their mean, see `jaxddp.step.gradient_hooks`.
        shard_optimizer: each replica holds one N-th of the optimizer's state, and updates one N-th of the parameters,
            see `jaxddp.step.zero`; the optimizer must treat every element of a group alike.
        group_of: function from a parameter's name to the number of its group, for `shard_optimizer`; set for
            `optim.grouped` by `DistributedDataParallel`. None: there is one group.
        divide_by_initial_world_size: divide by the number of all replicas, also of those without examples, like
            torch's `join`; False: by the number of replicas that have examples.
        scaler: loss scaler, which skips steps whose gradients overflow; None: no scaling.
        log_gradients: patterns of the names of parameters whose gradients are logged, see
            `jaxddp.tracking.gradient_metrics`.
        is_logged: function of the number of a step, counted from 1, to whether its metrics get the norm of the mean
            gradient before clipping, which takes time; they also get the learning rates that are known. None: neither.
        lr: learning rate of the optimizer, for the metrics, unless its state tells it; None: unknown.
        detect_anomaly: add metrics that identify gradients that are not finite, by replica and parameter.
        skip_nonfinite: undo a step whose loss or mean gradients are not finite, all but its count.
        local_sgd: strategy of post-local SGD, see `jaxddp.step.post_local_sgd`; None: gradients are averaged in every
            step.

    Raises:
        InputError: an unknown choice, options that do not combine, or a number out of its range.
    """

    loss_normalization: str = "ddp"
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    remat: bool = False
    comm_hook: CommHook | Callable[[Params], Params] | None = None
    keep_buffers: str = "rank0"
    ema_decay: float | None = None
    swa: bool = False
    frozen: tuple[str, ...] = ()
    find_unused_parameters: bool | None = False
    gradient_hooks: tuple[GradientHook, ...] = ()
    shard_optimizer: bool = False
    group_of: Callable[[str], int] | None = None
    divide_by_initial_world_size: bool = True
    scaler: GradScaler | None = None
    log_gradients: tuple[str, ...] = ()
    is_logged: Callable[[jax.Array], jax.Array] | None = None
    lr: optax.ScalarOrSchedule | None = None
    detect_anomaly: bool = False
    skip_nonfinite: bool = False
    local_sgd: PostLocalSGD | None = None

    def __post_init__(self) -> None:
        check_name("loss_normalization", self.loss_normalization, LOSS_NORMALIZATIONS)
        check_name("keep_buffers", self.keep_buffers, BUFFERS)
        check_range("clip_grad_norm", self.clip_grad_norm)
        check_range("clip_grad_value", self.clip_grad_value)
        if self.clip_grad_value is not None and self.clip_grad_norm is not None:
            raise InputError("clip_grad_value: cannot be combined with clip_grad_norm")
        check_range("ema_decay", self.ema_decay)
        if self.shard_optimizer and self.find_unused_parameters:
            raise InputError("shard_optimizer: cannot be combined with find_unused_parameters; freeze unused ones")
        if self.shard_optimizer and any(hook.when == "mean" for hook in self.gradient_hooks):
            raise InputError('shard_optimizer: replicas hold slices of the mean; gradient_hooks must be "local"')
        if self.skip_nonfinite and self.scaler is not None:
            raise InputError("skip_nonfinite: a loss scaler skips such steps already; leave one of the two out")
        if self.swa and self.ema_decay is not None:
            raise InputError("swa: cannot be combined with ema_decay; a run keeps one average")
        if self.local_sgd is not None:
            check_combines_with_local_sgd(self, "local_sgd")


class StepKeywords(TypedDict, total=False):
    """The fields of `StepOptions` as keyword arguments."""

    loss_normalization: str
    clip_grad_norm: float | None
    clip_grad_value: float | None
    remat: bool
    comm_hook: CommHook | Callable[[Params], Params] | None
    keep_buffers: str
    ema_decay: float | None
    swa: bool
    frozen: tuple[str, ...]
    find_unused_parameters: bool | None
    gradient_hooks: tuple[GradientHook, ...]
    shard_optimizer: bool
    group_of: Callable[[str], int] | None
    divide_by_initial_world_size: bool
    scaler: GradScaler | None
    log_gradients: tuple[str, ...]
    is_logged: Callable[[jax.Array], jax.Array] | None
    lr: optax.ScalarOrSchedule | None
    detect_anomaly: bool
    skip_nonfinite: bool
    local_sgd: PostLocalSGD | None


def options(config: TrainerConfig, functional: AnyFunctional) -> dict[str, Any]:
    """Return the step options that `config` sets for a model, as keyword arguments.

    Raises:
        InputError: `--freeze` matches no parameter of the model, or all; `--log-gradients` matches none that learns;
            or `--matrix-approximation-rank` is too large for the model.
    """
    params = functional.params
    frozen = frozen_params(config.freeze, params)
    learning = [name for name in params if name not in frozen]
    config.check_square(sum(params[name].size for name in learning))
    return {
        "loss_normalization": config.loss_normalization,
        "clip_grad_norm": config.clip_grad_norm,
        "clip_grad_value": config.clip_grad_value,
        "remat": config.remat,
        "comm_hook": comm_hooks.from_config(config, functional.gradient_order),
        "keep_buffers": config.buffers,
        "ema_decay": config.ema_decay,
        "swa": config.swa_start is not None,
        "frozen": frozen,
        "log_gradients": named_params("--log-gradients", config.log_gradients, learning),
        "detect_anomaly": config.detect_anomaly,
        "shard_optimizer": config.shard_optimizer,
        "divide_by_initial_world_size": config.divide_by_initial_world_size,
        "scaler": grad_scaler.from_config(config),
        "skip_nonfinite": config.on_nan == "skip",
        "local_sgd": post_local_sgd.from_config(config),
    }
