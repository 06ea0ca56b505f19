"""Table of planted faults, pairs of faults that can be planted together, and ports with them."""

from dataclasses import dataclass

from jaxddp.parity.port import Port

from . import planted_data, planted_model, planted_optimizer, planted_reduction
from .planted_edits import Edit, Planted, both
from .scenarios import Scenario, Translation
from .uncatalogued import UNCATALOGUED

# "fault" or "fault/variant" -> planted fault.
PLANTED: dict[str, Planted] = {
    **planted_reduction.PLANTED,
    **planted_optimizer.PLANTED,
    **planted_data.PLANTED,
    **planted_model.PLANTED,
}


def fault_of(label: str) -> str:
    """Return the catalogue's name of "fault" or "fault/variant"."""
    return label.partition("/")[0]


def edit_of(label: str) -> Edit:
    """Return the edit of a label of `PLANTED` or `UNCATALOGUED`."""
    return (PLANTED if label in PLANTED else UNCATALOGUED)[label].edit


def translated(scenario: Scenario, *labels: str) -> Translation:
    """Return the scenario's JAX half with faults."""
    return both(*map(edit_of, labels))(scenario.translation())


def plant(scenario: Scenario, *labels: str) -> Port:
    """Return the scenario's port with faults in its JAX half.

    Args:
        labels: keys of `PLANTED` or `UNCATALOGUED`; none: the correct port.
    """
    return translated(scenario, *labels).port()


@dataclass(frozen=True)
class PlantedPort:
    """A port with faults, as a few values that are cheap to pickle."""

    scenario: Scenario
    labels: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Scenario, optimizer and faults."""
        scenario = self.scenario
        return " ".join((f"{scenario.name} {scenario.optimizer} x{scenario.world_size}", *self.labels))

    def port(self) -> Port:
        """Build the port."""
        return plant(self.scenario, *self.labels)


def _pair(name: str, optimizer: str, one: str, other: str, world_size: int = 2) -> tuple[Scenario, str, str]:
    return Scenario(name, optimizer, world_size), one, other


PAIRS: tuple[tuple[Scenario, str, str], ...] = (
    # Within the optimizer
    _pair("mlp", "adamw", "decay_value", "eps_value"),
    _pair("mlp", "adamw", "decay_value", "lr_scaled"),
    _pair("mlp", "adamw", "betas", "decay_value/larger"),
    _pair("mlp", "adamw", "decay_without_lr", "betas/second"),
    _pair("mlp", "adamw", "scheduler_too_fast", "decay_value"),
    _pair("mlp", "adamw", "no_bias_correction", "decay_value/larger"),
    _pair("mlp", "adam", "coupled_decay/decoupled", "betas"),
    _pair("mlp", "adam", "eps_in_root", "lr_off_by_one"),
    _pair("mlp", "sgd", "nesterov", "lr_off_by_one"),
    _pair("mlp", "sgd", "betas/momentum", "decay_value"),
    _pair("mlp", "sgd_dampening", "dampening", "decay_value"),
    _pair("mlp", "rmsprop", "rmsprop_decay", "eps_in_root"),
    _pair("mlp", "adagrad", "adagrad_accumulator", "eps_in_root"),
    _pair("mlp_groups", "adamw", "decay_mask", "lr_scaled/root"),
    _pair("tokens_groups", "adamw", "decay_mask/norms", "betas"),
    _pair("tokens", "sgd", "decay_mask/biases", "lr_scaled"),
    _pair("mlp_warm_cosine", "adamw", "warmup_start", "decay_value"),
    _pair("mlp_warm_cosine", "sgd", "warmup_start/later", "nesterov"),
    # Within the model and its loss
    _pair("convnet", "sgd", "gelu_approximation/convnet", "norm_epsilon/batch_norm"),
    _pair("convnet", "adamw", "gelu_approximation/convnet", "label_smoothing"),
    _pair("convnet", "adamw", "same_padding", "layout"),
    _pair("tokens", "sgd", "gelu_approximation/tokens", "norm_epsilon"),
    _pair("tokens", "adamw", "norm_epsilon", "padding_idx"),
    _pair("policy", "sgd", "std_correction/added", "clipped_term/always"),
    _pair("policy", "adamw", "std_correction", "clamp_missing"),
    # Between loss and optimizer
    _pair("mlp_accumulated", "sgd", "accumulation_not_divided", "sum_not_mean"),
    _pair("mlp_accumulated", "adamw", "accumulation_not_divided", "averaged_twice", 4),
    _pair("mlp", "sgd", "sum_not_mean", "clip_epsilon"),
    # In different stages
    _pair("convnet", "sgd", "compressed_all_reduce", "buffers_local"),
    _pair("mlp", "adamw", "sum_not_mean", "decay_value"),
    _pair("mlp", "sgd", "set_epoch_missing", "lr_scaled"),
    _pair("mlp", "adamw", "same_dropout_mask", "gelu_approximation"),
    _pair("convnet", "adamw", "same_shard", "biased_variance"),
    _pair("mlp", "adamw", "shards_in_blocks", "eps_value"),
    _pair("mlp", "sgd", "neighbours_values", "lr_scaled"),
    _pair("convnet", "adamw", "batch_norm_momentum", "coupled_decay"),
    _pair("resnet", "sgd", "same_padding/stages", "biased_variance/deep"),
    _pair("policy", "adamw", "clamp_missing/above", "betas"),
    _pair("tokens_global", "sgd", "mean_per_rank", "norm_epsilon"),
    _pair("tokens", "sgd", "tied_weights/output", "clip_norm_local"),
    _pair("tokens", "adamw", "padding_idx", "clip_epsilon"),
    _pair("tokens", "adamw", "ignore_index", "no_bias_correction"),
    _pair("convnet", "sgd", "label_smoothing", "lr_in_momentum"),
    _pair("convnet", "sgd", "batch_norm_eval", "resume_lost_state"),
    _pair("convnet", "adamw", "fast_variance", "loss_scale"),
    _pair("mlp_penalty", "adam", "auxiliary_loss_scaled/forgotten", "coupled_decay/decoupled"),
    _pair("convnet", "adamw", "batch_norm_sync", "eps_value"),
    _pair("convnet_accumulated", "adamw", "buffers_averaged", "scheduler_too_fast"),
    _pair("mlp", "adamw", "reduced_precision_matmul", "amsgrad"),
    _pair("mlp", "sgd", "sampler_offset_lost", "clip_missing"),
    _pair("mlp", "adamw", "padding_or_dropping", "clipped_before_mean"),
    _pair("mlp", "rmsprop", "rmsprop_centred", "collective_in_loss"),
    _pair("mlp", "rmsprop", "rmsprop_decay", "check_vma"),
    _pair("mlp", "sgd_dampening", "dampening", "different_start"),
    _pair("mlp_groups", "adamw", "decay_mask", "no_sync"),
)
