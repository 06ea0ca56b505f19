"""Configuration and command line: each bad value raises an error of one line that says what would be right."""

import dataclasses
import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jaxddp import cli
from jaxddp.config import TrainConfig
from jaxddp.config.checks import flag
from jaxddp.config.choices import BELONGS_TO, FREE_ON_RESUME, KEPT_ON_OR_OFF_ON_RESUME, KEPT_ON_RESUME, NAMED
from jaxddp.config.period import UNITS, Period
from jaxddp.errors import InputError
from jaxddp.tracking.run_folder import save_config
from torch_ref.config import TorchConfig

NO_DEFAULT: dict[str, Any] = {
    "dataset": "names",
    "model": "char_mlp",
    "hidden_sizes": (7, 5),
    "optimizer": "adamw",
    "lr": 0.1,
    "betas": (0.8, 0.9),
    "amsgrad": True,
    "clip_grad_norm": 2.0,
    "shuffle": False,
    "seed": 2**64 - 30,
    "output": "a folder",
}

SAMPLES: dict[str, Any] = {"data_path": "file", "hidden_sizes": (3,), "betas": (0.5, 0.5), "cycle_momentum": False}
SAMPLES |= {"buffers": "mean", "use_error_feedback": False, "warm_start": False, "min_compression_rate": 3.0}
SAMPLES |= {"dropout": 0.5, "growth_factor": 3.0, "backoff_factor": 0.25, "rho": 0.5}
SAMPLES |= {"etas": (0.4, 1.5), "step_sizes": (0.1, 1.0)}
NEEDED = {"npz": {"data_path": "f"}, "names": {"model": "char_mlp"}, "char_mlp": {"dataset": "names"}}
NEEDED |= {"nesterov": {"momentum": 0.9}, "multi_step": {"milestones": (3,)}, "exponential": {"gamma": 0.5}}
NEEDED |= {"cosine_restarts": {"t_0": 3}, "cyclic": {"max_lr": 1.0}}
SAMPLES |= {"milestones": (2,), "factor": 0.5, "start_factor": 0.5, "end_factor": 0.5, "pct_start": 0.5}
SAMPLES |= {"cyclic_mode": "triangular2", "threshold_mode": "abs"}
FLAGS = "sync_batch_norm", "nesterov", "amsgrad", "centered", "decoupled_weight_decay"


# ---- values


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "mpl"}, "--model mpl: unknown; did you mean mlp? (one of linear, mlp, char_mlp, convnet)"),
        ({"dataset": "digit"}, "--dataset digit: unknown; did you mean digits? "),
        ({"optimizer": "lion"}, "--optimizer lion: unknown (one of sgd, "),
        ({"schedule": "cosin"}, "--schedule cosin: unknown; did you mean cosine? "),
        ({"schedule": "multi_step"}, "--schedule multi_step: needs --milestones"),
        ({"schedule": "exponential"}, "--schedule exponential: needs --gamma"),
        ({"schedule": "cosine_restarts"}, "--schedule cosine_restarts: needs --t-0"),
        ({"schedule": "cyclic"}, "--schedule cyclic: needs --max-lr"),
        ({"schedule": "plateau", "factor": 1.0}, "--factor 1.0: must be below 1 with --schedule plateau"),
        ({"milestones": (3, 0)}, "--milestones 3 0: each must be at least 1"),
        ({"start_factor": 0.0}, "--start-factor 0.0: must be above 0 and at most 1"),
        ({"pct_start": 1.5}, "--pct-start 1.5: must be 0 to 1"),
        ({"swa_lr": 0.1}, "--swa-lr 0.1: needs --swa-start"),
        ({"swa_start": 30}, "--swa-start 30: must be below --epochs 30, or nothing is averaged"),
        ({"swa_start": 3, "ema_decay": 0.9}, "--swa-start 3: cannot be combined with --ema-decay; a run keeps one"),
        ({"swa_start": 3, "swa_lr": 0.1, "schedule": "plateau"}, "--swa-lr 0.1: cannot be combined with --schedule pl"),
        ({"swa_start": 3, "start_local_sgd_iter": 3}, "--swa-start 3: cannot be combined with --start-local-sgd-iter"),
        ({"clip_grad_value": 0.0}, "--clip-grad-value 0.0: must be above 0"),
        ({"clip_grad_value": 1.0, "clip_grad_norm": 1.0}, "--clip-grad-value 1.0: cannot be combined with --clip-grad"),
        ({"label_smoothing": 1.0}, "--label-smoothing 1.0: must be at least 0 and below 1"),
        ({"evaluate_every": "2minutes"}, "--evaluate-every 2minutes: must be a number of epochs or steps above 0"),
        ({"evaluate_every": 0}, "--evaluate-every 0: must be a number of epochs or steps above 0"),
        ({"best_mode": "least"}, "--best-mode least: unknown (one of min, max)"),
        ({"early_stopping_patience": 0}, "--early-stopping-patience 0: must be at least 1"),
        ({"track": ("tensorboard", "wandb")}, "--track wandb: needs --output"),
        ({"track": ("wandb", "tensorbord")}, "--track tensorbord: unknown; did you mean tensorboard?"),
        ({"loss_normalization": "dpp"}, "--loss-normalization dpp: unknown; did you mean ddp? (one of ddp, global)"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16: unknown; did you mean float"),
        ({"platform": "tpu"}, "--platform tpu: unknown"),
        ({"checkpoint_every": "1.5steps"}, "--checkpoint-every 1.5steps: must be like 5 (epochs), 5epochs, 200steps"),
        ({"checkpoint_every": "-2steps"}, "--checkpoint-every -2steps: must be at least 0"),
        ({"checkpoint_every": 2**31}, "--checkpoint-every 2147483648: must be at most 2147483647"),
        *(({"checkpoint_every": "9" * 400 + unit}, "--checkpoint-every 999") for unit in ("steps", ".5minutes")),
        *(
            ({name: value}, f"{flag(name)} {value}: must be ")
            for name in ("join_timeout", "stall_timeout")
            for value in (1e300, float("inf"), float("nan"), -1.0)
        ),
        ({"join_timeout": 0.0}, "--join-timeout 0.0: must be above 0"),
        ({"log_every": 0}, "--log-every 0: must be at least 1"),
        ({"ema_decay": 1.5}, "--ema-decay 1.5: must be 0 to 1"),
        ({"dropout": 1.0}, "--dropout 1.0: must be at least 0 and below 1"),
        ({"dropout": float("nan")}, "--dropout nan: must be at least 0 and below 1"),
        ({"dropout": 0.1, "dropout_masks": "shard"}, "--dropout-masks shard: unknown; did you mean shared?"),
        ({"dropout_masks": "shared"}, "--dropout-masks shared: needs --dropout above 0"),
        ({"amp": "fp8"}, "--amp fp8: unknown; did you mean fp16? (one of none, bf16, fp16)"),
        ({"amp": "bf16", "dtype": "float64"}, "--amp bf16: computes float32 in 16 bits, so it needs --dtype float32"),
        ({"init_scale": 0.0}, "--init-scale 0.0: must be above 0 and finite"),
        ({"growth_factor": 1.0}, "--growth-factor 1.0: must be above 1 and finite"),
        ({"backoff_factor": 1.0}, "--backoff-factor 1.0: must be between 0 and 1"),
        ({"comm_hook": "powerSDG"}, "--comm-hook powerSDG: unknown"),
        ({"warm_start": False}, "--no-warm-start: only for --comm-hook powerSGD or batched_powerSGD, not allreduce"),
        ({"comm_hook": "powerSGD", "start_power_sgd_iter": 1}, "--start-power-sgd-iter 1: must be at least 2 unless "),
        ({"buffers": "rank1"}, "--buffers rank1: unknown; did you mean rank0? (one of rank0, mean, local)"),
        ({"lr_scaling": "log"}, "--lr-scaling log: unknown (one of none, linear, sqrt)"),
        ({"dataset": "npz"}, "--dataset npz: needs --data-path FILE.npz"),
        ({"amp": "fp16", "comm_hook": "powerSGD"}, "--amp fp16: an overflow would stay in the state of --comm-hook "),
        ({"model": "char_mlp"}, "--model char_mlp: reads characters, so it needs --dataset names, not digits"),
        ({"dataset": "names"}, "--dataset names: holds characters, so it needs --model char_mlp, not mlp"),
        ({"hidden_sizes": (8, 0)}, "--hidden-sizes 8 0: each must be at least 1"),
        ({"betas": (0.9, 1.0)}, "--betas 0.9 1.0: each must be at least 0 and below 1"),
        ({"betas": (float("nan"), 0.9)}, "--betas nan 0.9: each must be"),
        ({"clip_grad_norm": 0.0}, "--clip-grad-norm 0.0: must be above 0"),
        ({"clip_grad_norm": float("nan")}, "--clip-grad-norm nan: must be above 0"),
        ({"seed": 2**64}, "--seed 18446744073709551616: must stay below 2**64"),
        ({"seed": 2**64 - 1, "epochs": 2}, "--seed 18446744073709551615: must stay below 2**64 over 2 epochs"),
        ({"epochs": 2**31}, "--epochs 2147483648: must be at most 2147483647"),
        ({"hidden_sizes": (8, 10**400)}, "--hidden-sizes 8 1000000000"),
        ({"lr": 10**400}, "--lr 1000000000"),
        ({"clip_grad_norm": 10**400}, "--clip-grad-norm 1000000000"),
        ({"init_scale": 10**400}, "--init-scale 1000000000"),
        ({"lr": float("nan")}, "--lr nan: must be at least 0"),
        ({"lr": float("inf")}, "--lr inf: must be finite"),
        (
            {"optimizer": "sgd", "betas": (0.9, 0.8)},
            "--betas 0.9 0.8: only for --optimizer adam, adamw, adamax, nadam or radam, not sgd",
        ),
        ({"sync_batch_norm": True}, "--sync-batch-norm: only for --model char_mlp or convnet, not mlp"),
        ({"optimizer": "sgd", "nesterov": True}, "--nesterov: needs --momentum above 0 and no --dampening"),
        ({"local_sgd_period": 3}, "--local-sgd-period 3: needs --start-local-sgd-iter"),
        ({"start_local_sgd_iter": -1}, "--start-local-sgd-iter -1: must be at least 0"),
        (
            {"start_local_sgd_iter": 3, "ema_decay": 0.9},
            "--ema-decay 0.9: cannot be combined with --start-local-sgd-iter, where replicas step separately",
        ),
        (
            {"optimizer": "sgd", "shard_optimizer": True},
            "--shard-optimizer: sgd without --momentum has no state to shard",
        ),
        (
            {"optimizer": "rprop", "etas": (1.1, 1.2)},
            "--etas 1.1 1.2: must be below 1 and above 1",
        ),
        (
            {"optimizer": "adagrad", "schedule": "one_cycle"},
            "--schedule one_cycle: adagrad has no momentum to cycle; add --no-cycle-momentum",
        ),
    ],
    ids=str,
)
def test_an_error_names_the_bad_value_and_the_right_ones(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        TrainConfig(**fields).check_used(baseline=TrainConfig())
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_more_steps_than_int32_counts_are_refused() -> None:
    config = TrainConfig(epochs=2**31 // 45)
    assert config.total_steps(45) == 2**31 // 45 * 45
    with pytest.raises(InputError, match=r"^--epochs 47721858: must be at most 46684427 with 46 steps per epoch, "):
        config.total_steps(46)


AT_LEAST_ONE = "num_examples num_features num_classes context_length embedding_size step_size global_batch_size "
AT_LEAST_ONE += (
    "keep_checkpoints accumulation_steps devices steps_per_dispatch matrix_approximation_rank growth_interval"
)
AT_LEAST_ZERO = "epochs warmup_steps verify_every checkpoint_every seed lr weight_decay eps min_lr gamma "
AT_LEAST_ZERO += "min_compression_rate"


@pytest.mark.parametrize(
    ("name", "least"), [(n, 1) for n in AT_LEAST_ONE.split()] + [(n, 0) for n in AT_LEAST_ZERO.split()]
)
def test_a_number_below_its_minimum_is_refused(name: str, least: int) -> None:
    TrainConfig(**{name: least})
    with pytest.raises(InputError, match=f"^{flag(name)} {least - 1}: must be at least {least}$"):
        TrainConfig(**{name: least - 1})


@pytest.mark.parametrize(
    ("written", "period"),
    [
        (5, Period(5, "epochs")),
        ("5", Period(5, "epochs")),
        ("5 epochs", Period(5, "epochs")),
        ("1epoch", Period(1, "epochs")),
        ("200steps", Period(200, "steps")),
        ("0.5minutes", Period(0.5, "minutes")),
        (0, Period(0, "epochs")),
    ],
)
def test_checkpoints_may_be_counted_in_epochs_steps_or_minutes(
    written: int | str, period: Period, tmp_path: Path
) -> None:
    config = cli.parse(TrainConfig, ["--checkpoint-every", str(written)], "train")
    assert config.checkpoint_period == period
    save_config(config, tmp_path)
    assert cli.parse(TrainConfig, ["--resume", str(tmp_path)], "train").checkpoint_period == period


def test_a_period_of_zero_never_passes() -> None:
    assert not any(Period(0, unit).passed(unit, 0, 100) for unit in UNITS)


def test_torch_ref_saves_between_epochs_only() -> None:
    assert TorchConfig(checkpoint_every="3epochs").checkpoint_period == Period(3, "epochs")
    with pytest.raises(InputError, match=r"^--checkpoint-every 5steps: torch_ref saves between epochs; must be a num"):
        TorchConfig(checkpoint_every="5steps")


@pytest.mark.parametrize(
    "flags",
    ["--keep-checkpoints 5", "--stall-timeout 60.0", "--join-timeout 60.0", "--steps-per-dispatch 4"],
)
def test_torch_ref_refuses_options_without_effect_there(flags: str) -> None:
    cli.parse(TrainConfig, flags.split(), "train")
    with pytest.raises(InputError, match=f"^{flags}: only for jaxddp.train; leave it out$"):
        cli.parse(TorchConfig, flags.split(), "train")


@pytest.mark.parametrize(
    ("choice", "option"), [(choice, option) for choice, options in BELONGS_TO.items() for option in options]
)
def test_an_option_without_effect_is_refused(choice: str, option: str) -> None:
    value = SAMPLES.get(option, option in FLAGS or 2)
    takers = BELONGS_TO[choice][option]
    for name in NAMED[choice]:
        fields = NEEDED.get(name, {}) | {choice: name, option: value}
        if name in takers:
            TrainConfig(**fields | NEEDED.get(option, {})).check_used(baseline=TrainConfig())
        else:
            config = TrainConfig(**fields)
            config.check_used(baseline=config)  # the saved config of a resumed run may have it
            message = f"{flag(option)[2:]}.*: only for {flag(choice)} .*{takers[-1]}, not {name}$"
            with pytest.raises(InputError, match=message):
                config.check_used(baseline=TrainConfig())


@pytest.mark.parametrize(
    ("batch", "accumulation", "world_size", "near"),
    [(33, 1, 2, "32 or 34"), (32, 3, 4, "24 or 36"), (3, 2, 2, "4"), (1, 1, 8, "8")],
)
def test_an_indivisible_batch_size_is_refused_and_the_nearest_ones_are_named(
    batch: int, accumulation: int, world_size: int, near: str
) -> None:
    config = TrainConfig(global_batch_size=batch, accumulation_steps=accumulation)
    message = (
        f"--global-batch-size {batch}: must be divisible by {world_size} replicas x {accumulation} accumulation steps"
    )
    with pytest.raises(InputError, match=f"^{message}; {near} would do$"):
        config.per_replica_batch_size(world_size)


def test_the_global_batch_is_divided_by_the_world_size() -> None:
    assert TrainConfig(global_batch_size=24, accumulation_steps=3).per_replica_batch_size(4) == 6


# ---- resumed runs


def test_each_option_is_kept_or_free_when_a_run_resumes_or_its_change_is_told() -> None:
    """List the third group here, so that a new option is put into one of them on purpose."""
    told = "dropout dropout_masks sync_batch_norm lr lr_scaling dampening nesterov weight_decay betas eps alpha "
    told += "decoupled_weight_decay momentum_decay rho lambd t0 etas step_sizes maximize "
    told += "lr_decay schedule step_size gamma warmup_steps min_lr cycle_momentum epochs accumulation_steps "
    told += "milestones factor start_factor end_factor total_iters power t_max t_0 t_mult max_lr step_size_up "
    told += "step_size_down cyclic_mode pct_start div_factor final_div_factor patience threshold threshold_mode "
    told += "cooldown swa_lr anneal_epochs clip_grad_value label_smoothing best_metric best_mode "
    told += "loss_normalization clip_grad_norm divide_by_initial_world_size comm_hook start_power_sgd_iter "
    told += "local_sgd_period platform shard_optimizer growth_factor backoff_factor growth_interval devices strategy"
    groups = (KEPT_ON_RESUME, KEPT_ON_OR_OFF_ON_RESUME, FREE_ON_RESUME, told.split())
    assert Counter(itertools.chain(*groups)) == Counter(field.name for field in dataclasses.fields(TorchConfig))


@pytest.mark.parametrize(
    ("fields", "before", "message"),
    [
        ({"initial_accumulator_value": 1.0}, {}, "--initial-accumulator-value 1.0: .* must continue with its default"),
        ({"momentum": 0.9}, {}, "--momentum 0.9: the run in runs/a must continue with its default"),
        ({"momentum": 0.0}, {"momentum": 0.9}, "--momentum 0.0: the run in runs/a must continue with --momentum 0.9"),
        ({"ema_decay": 0.9}, {}, "--ema-decay 0.9: the run in runs/a must continue with its default"),
        ({"ema_decay": 0.9}, {"ema_decay": 0.8}, "--ema-decay 0.9 instead of 0.8"),
        ({"momentum": 0.9}, {"momentum": 0.8}, "--momentum 0.9 instead of 0.8"),
        ({"lr": 0.1, "dropout": 0.5}, {}, "--dropout 0.5 instead of 0.0, --lr 0.1 instead of its default"),
        ({}, {"lr": 0.1, "shard_optimizer": True}, "--lr None instead of 0.1, --no-shard-optimizer instead of --shard"),
        ({"epochs": 40}, {}, "$"),
        ({"epochs": 40, "schedule": "one_cycle"}, {"schedule": "one_cycle"}, "--epochs 40 instead of 30"),
        ({"epochs": 40, "schedule": "cosine"}, {"schedule": "cosine"}, "--epochs 40 instead of 30"),
        ({"epochs": 40, "schedule": "cosine", "t_max": 9}, {"schedule": "cosine", "t_max": 9}, "$"),
        ({"schedule": "plateau"}, {}, "--schedule plateau: the run in runs/a must continue with --schedule constant"),
        (
            {"schedule": "plateau", "lr": 0.1},
            {"schedule": "plateau"},
            "--lr 0.1: the run in runs/a must continue with ",
        ),
        ({"schedule": "plateau", "factor": 0.5}, {"schedule": "plateau"}, "--factor 0.5 instead of its default"),
        ({"swa_start": 3}, {}, "--swa-start 3: the run in runs/a must continue with its default"),
        ({"log_every": 7, "verify_every": 3, "keep_best": True, "steps_per_dispatch": 1}, {}, "$"),
    ],
    ids=str,
)
def test_a_changed_option_of_a_resumed_run_is_refused_or_told(
    fields: dict[str, Any], before: dict[str, Any], message: str
) -> None:
    saved, now = TrainConfig(**before), TrainConfig(**fields, resume="runs/a")
    try:
        now.check_resumes(saved)
        said = ", ".join(now.changes(dataclasses.asdict(saved)))
    except InputError as error:
        said = str(error)
    assert re.match(message, said)
