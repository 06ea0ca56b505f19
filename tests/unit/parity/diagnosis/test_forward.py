"""Faults planted in jax twins, in the forward or backward pass: known ones are named with their values."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from torch import nn
from torch.nn import functional as F

from jaxddp.parity.diagnosis.forward.buffers import Buffers, explain_buffers
from jaxddp.parity.diagnosis.forward.layout import kernel_axes
from jaxddp.parity.diagnosis.forward.loss_causes import LossAndGradients
from jaxddp.parity.diagnosis.forward.sites import trace
from jaxddp.parity.diagnosis.search.decide import Ruling
from jaxddp.parity.diagnosis.search.fit import residual_at
from tests.support.rulings import check_named, explain_model
from tests.support.twin_models import CONVNET, MLP, TRANSFORMER, Twins
from tests.support.twins import evidence

CLEAN = 1e-14  # measured: up to 1.7e-15
FEW = 100  # replays where nothing can be found

pytestmark = pytest.mark.usefixtures("x64", "one_thread")


def tf32(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_precision(x, 8, 10)


def bfloat16(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(x.dtype)


@jax.custom_jvp
def tf32_forward(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_precision(x, 8, 10)


tf32_forward.defjvp(lambda x, tangent: (tf32_forward(*x), tangent[0]))


def worst(subject: Buffers | LossAndGradients) -> float:
    """Return JAX's residual against the reference in the worst step and tensor."""
    return max(residual_at(subject, (step, subject.ranks)) for step in range(subject.steps))


@pytest.mark.large
@pytest.mark.parametrize(
    ("twins", "loss_normalization"),
    [
        pytest.param(TRANSFORMER, "ddp", id="transformer"),
        pytest.param(TRANSFORMER, "global", id="transformer, global"),
        pytest.param(MLP, "ddp", id="mlp"),
        pytest.param(CONVNET, "ddp", id="convnet", marks=pytest.mark.large),
    ],
)
def test_a_correct_twin_leaves_rounding_only(twins: Twins, loss_normalization: str) -> None:
    run = evidence(twins, loss_normalization=loss_normalization, micro_batches=2, steps=2)
    assert worst(LossAndGradients(run)) < CLEAN
    assert worst(Buffers(run)) < CLEAN
    assert explain_model(run) == explain_buffers(run) == Ruling((), None)


SINGLE: list[tuple[Twins, dict[str, Any], str, str]] = [
    (TRANSFORMER, {"gelu": "everywhere", "steps": 3}, "gelu_approximation", "GELU by tanh"),
    (TRANSFORMER, {"eps": 1e-6}, "norm_epsilon", "LayerNorm eps 1e-06, the reference has 1e-05"),
    (CONVNET, {"eps": 1e-2}, "norm_epsilon", "BatchNorm eps 0.01, the reference has 1e-05"),
    (MLP, {"rms_eps": 1e-5}, "norm_epsilon", "under a root, eps 1e-05 in norm, the reference has 1e-06"),
    (TRANSFORMER, {"smoothing": 0.0}, "label_smoothing", "label smoothing 0, the reference has 0.1"),
    (TRANSFORMER, {"ignored_count": True}, "ignore_index", "labels of -100 count in the mean"),
    (MLP, {"not_ignored": True}, "ignore_index", "labels of 0 are not ignored"),
    (TRANSFORMER, {"padding_idx": True}, "padding_idx", "row 0 of an embedding gets a gradient in embed"),
    (TRANSFORMER, {"untied": True}, "tied_weights", "embed.weight gets no gradient from linear in head"),
    (
        TRANSFORMER,
        {"penalty": 3.0, "loss_normalization": "global", "steps": 2},
        "auxiliary_loss_scaled",
        "the second term of a sum of losses times 3",
    ),
    (
        TRANSFORMER,
        {"head_layout": True},
        "layout",
        "an axis split into (0, 1, 2, 3) in the order (0, 1, 3, 2) in blocks.* (call 3)",
    ),
    (CONVNET, {"flatten": True}, "layout", "axes (0, 1, 2, 3) merged in the order (0, 2, 3, 1)"),
    (CONVNET, {"same": True}, "same_padding", "convolution padded 'SAME', (0, 1, 0, 1) in conv1"),
    (CONVNET, {"sync": True, "micro_batches": 2}, "batch_norm_sync", "BatchNorm over all replicas"),
    (
        TRANSFORMER,
        {"rounding": tf32},
        "reduced_precision_matmul",
        "inputs of matrix products rounded to TF32 by a cast",
    ),
    (TRANSFORMER, {"stale": True, "steps": 2}, "stale_parameters", "gradients at the parameters of the step before"),
    (TRANSFORMER, {"combine": "scaled"}, "loss_scale", "loss and gradients times 8"),
    (
        MLP,
        {"combine": "psum"},
        "collective_in_loss",
        "the differentiated loss holds a sum over replicas: local gradients times 2",
    ),
    (
        TRANSFORMER,
        {"combine": "not_divided", "micro_batches": 3},
        "accumulation_not_divided",
        "the gradients of 3 micro-batches are added and not divided",
    ),
    (
        TRANSFORMER,
        {"combine": "ddp", "loss_normalization": "global", "micro_batches": 2},
        "mean_per_micro_batch",
        "a mean over each micro-batch's elements, the reference has one mean over the elements of all ranks",
    ),
    (
        TRANSFORMER,
        {"combine": "rank", "loss_normalization": "global", "micro_batches": 2},
        "mean_per_rank",
        "a mean over each rank's elements, the reference has one mean over the elements of all ranks",
    ),
]


# The same faults elsewhere, or with other values.
MORE: list[tuple[Twins, dict[str, Any], str, str]] = [
    (TRANSFORMER, {"gelu": 1}, "gelu_approximation", "GELU by tanh in blocks.1.act"),
    (TRANSFORMER, {"eps1": 1e-3}, "norm_epsilon", "LayerNorm eps 0.001 in blocks.1.norm1, the reference has 1e-05"),
    (MLP, {"group_eps": 1e-6}, "norm_epsilon", "GroupNorm eps 1e-06 in group, the reference has 1e-05"),
    (MLP, {"smoothing": 0.2}, "label_smoothing", "label smoothing 0.2, the reference has 0"),
    (MLP, {"ignored_count": True}, "ignore_index", "labels of 0 count in the mean"),
    (TRANSFORMER, {"not_moved_back": True}, "layout", "axes (0, 1, 2, 3) merged in the order (0, 2, 1, 3)"),
    (CONVNET, {"kernel": True}, "layout", "kernel's axes (2, 3) swapped in conv2"),
    # The pooled values are below 0 too, so that each layer needs its own filling.
    (CONVNET, {"same": True, "same_pool": True}, "same_padding", "layers padded 'SAME'"),
    (CONVNET, {"same_pool": True}, "same_padding", "max pooling padded 'SAME', (0, 1, 0, 1) in pool"),
    (
        TRANSFORMER,
        {"rounding": tf32_forward},
        "reduced_precision_matmul",
        "inputs of matrix products rounded to TF32, forward only",
    ),
    (
        TRANSFORMER,
        {"rounding": bfloat16},
        "reduced_precision_matmul",
        "inputs of matrix products rounded to bfloat16 by a cast",
    ),
]


@pytest.mark.one_in(31, first=3)
@pytest.mark.parametrize(
    ("twins", "options", "fault", "says"),
    # tests/faults/test_planted.py plants each kind in a whole port.
    [pytest.param(*case) for case in SINGLE + MORE],
    ids=[f"{case[2]} {next(iter(case[1]))}" for case in SINGLE + MORE],
)
def test_a_fault_is_named(twins: Twins, options: dict[str, Any], fault: str, says: str) -> None:
    check_named(explain_model(evidence(twins, **options)), ({fault}, says))


PAIRS: list[tuple[Twins, dict[str, Any], set[str], str]] = [
    (
        TRANSFORMER,
        {"gelu": "everywhere", "eps": 1e-6},
        {"gelu_approximation", "norm_epsilon"},
        "GELU by tanh; LayerNorm eps 1e-06, the reference has 1e-05",
    ),
    (
        TRANSFORMER,
        {"smoothing": 0.0, "ignored_count": True},
        {"label_smoothing", "ignore_index"},
        "labels of -100 count in the mean; label smoothing 0, the reference has 0.1",
    ),
    (
        TRANSFORMER,
        {"combine": "not_divided", "micro_batches": 3, "smoothing": 0.0},
        {"accumulation_not_divided", "label_smoothing"},
        "label smoothing 0, the reference has 0.1; the gradients of 3 micro-batches are added and not divided",
    ),
    (
        CONVNET,
        {"same": True, "sync": True},
        {"same_padding", "batch_norm_sync"},
        "convolution padded 'SAME', (0, 1, 0, 1) in conv1; BatchNorm over all replicas",
    ),
    (
        TRANSFORMER,
        {"eps0": 1e-6, "eps1": 1e-3},
        {"norm_epsilon"},
        "LayerNorm eps 0.001 in blocks.1.norm1, the reference has 1e-05; "
        "LayerNorm eps 1e-06 in blocks.0.norm1, the reference has 1e-05",
    ),
]


@pytest.mark.large
@pytest.mark.parametrize(
    ("twins", "options", "faults", "says"),
    [pytest.param(*case, id="+".join(sorted(case[2]))) for case in PAIRS],
)
def test_two_faults_are_named(twins: Twins, options: dict[str, Any], faults: set[str], says: str) -> None:
    check_named(explain_model(evidence(twins, **options)), (faults, says))


def one_gradient_scaled(gradients: dict[str, np.ndarray]) -> None:
    gradients["blocks.0.fc1.weight"] *= 1.1


@pytest.mark.large
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.2},
        {"relu": True},
        {"residual": True},
        {"stop_gradient": True},
        {"change": one_gradient_scaled},
        {"branch": 0.9},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_unknown_fault_is_not_named(options: dict[str, Any]) -> None:
    ruling = explain_model(evidence(TRANSFORMER, **options), replays=FEW)
    assert ruling.named == ()
    assert ruling.runner_up.residual > 1e-3  # measured: at least 1.9e-2


@pytest.mark.large
def test_a_factor_that_nobody_would_choose_is_not_called_a_loss_scale() -> None:
    def scale(gradients: dict[str, np.ndarray]) -> None:
        for gradient in gradients.values():
            gradient *= 7 / 9

    ruling = explain_model(evidence(TRANSFORMER, change=scale), replays=FEW)
    assert ruling.named == ()


@pytest.mark.large
def test_a_replica_without_labels_has_no_loss_on_either_side() -> None:
    run = evidence(TRANSFORMER, gelu="everywhere", no_labels_of=1)
    assert np.isnan(run.steps[0].local_loss).tolist() == [False, True]
    check_named(explain_model(run), ({"gelu_approximation"}, "GELU by tanh"))


BUFFERS: list[tuple[dict[str, Any], set[str], str]] = [
    ({"momentum": 0.9}, {"batch_norm_momentum"}, "BatchNorm momentum 0.9, the reference has 0.1"),
    ({"biased": True}, {"biased_variance"}, "BatchNorm keeps the biased variance"),
    ({"sync": True}, {"batch_norm_sync"}, "BatchNorm over all replicas"),
    ({"own_buffers": True}, {"buffers_local"}, "each replica keeps its own buffers, the reference those of rank 0"),
    (
        {"mean_buffers": True},
        {"buffers_averaged"},
        "the buffers are the mean over the replicas, the reference keeps rank 0's",
    ),
    (
        {"momentum": 0.01, "biased": True},
        {"batch_norm_momentum", "biased_variance"},
        "BatchNorm momentum 0.01, the reference has 0.1; BatchNorm keeps the biased variance",
    ),
    (
        {"own_buffers": True, "biased": True, "micro_batches": 2},
        {"buffers_local", "biased_variance"},
        "each replica keeps its own buffers, the reference those of rank 0; BatchNorm keeps the biased variance",
    ),
]


@pytest.mark.one_in(7)
@pytest.mark.parametrize(("options", "faults", "says"), BUFFERS, ids=["+".join(case[0]) for case in BUFFERS])
def test_faults_of_buffers_are_named(options: dict[str, Any], faults: set[str], says: str) -> None:
    check_named(explain_buffers(evidence(CONVNET, **options)), (faults, says))


def test_an_unknown_fault_of_buffers_is_not_named() -> None:
    run = evidence(CONVNET)
    for step in run.steps:
        step.buffers["bn1.running_var"][...] *= 1.01  # type: ignore[index]
    assert explain_buffers(run).named == ()


def test_calls_inside_multi_head_attention_are_recorded() -> None:
    module = nn.MultiheadAttention(4, 2, batch_first=True)
    calls = trace(
        module, lambda model, x: {"loss": F.gelu(model(x["x"], x["x"], x["x"])[0]).sum()}, {"x": torch.ones(1, 3, 4)}
    )
    assert [(call.name, call.module) for call in calls if call.name in ("linear", "gelu")] == [
        *[("linear", ""), ("linear", ""), ("gelu", None)]
    ]


def test_a_transposed_convolution_has_no_other_kernel_axes() -> None:
    net = nn.ConvTranspose2d(3, 3, 2)
    calls = trace(net, lambda model, batch: {"loss": model(batch["x"]).sum()}, {"x": torch.ones(1, 3, 4, 4)})
    assert "conv_transpose2d" in [call.name for call in calls]
    assert [change for call in calls for change in kernel_axes(call)] == []
