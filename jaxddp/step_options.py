"""What a run's configuration says of its replica step."""

from typing import Any

from flax import nnx

from jaxddp import comm_hooks, grad_scaler, local_sgd
from jaxddp.config import TrainConfig
from jaxddp.functional import Functional
from jaxddp.weights import frozen_params, named_params


def options(config: TrainConfig, model: nnx.Module) -> dict[str, Any]:
    """What `config` says of the `ReplicaStep` of this model, by the names of its attributes.

    Raises:
        InputError: `--freeze` names none of its parameters, or all, or `--log-gradients` none that learns.
    """
    params = Functional(model).params
    frozen = frozen_params(config.freeze, params)
    learning = [name for name in params if name not in frozen]
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
        "local_sgd": local_sgd.from_config(config),
    }
