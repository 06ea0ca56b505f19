"""Replica step: compared with arithmetic by hand and on virtual replicas, and as a compiled program."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax import numpy as jnp
from jax.ad_checkpoint import print_saved_residuals

from jaxddp import optim
from jaxddp.data.torch_rng import Generator
from jaxddp.data_parallel import DistributedDataParallel
from jaxddp.distributed.collectives import all_reduce
from jaxddp.distributed.replicas import VirtualReplicas
from jaxddp.errors import InputError, TrainingError
from jaxddp.nn import layers
from jaxddp.nn.losses import IGNORE_INDEX, Losses, cross_entropy
from jaxddp.step import local_gradients
from jaxddp.step.grad_scaler import GradScaler
from jaxddp.step.gradient_hooks import GradientHook
from jaxddp.step.loops import primitives
from jaxddp.step.options import StepKeywords, StepOptions
from tests.support.step_cases import CLASSES, FEATURES, TOKENS, Arrays, Net, dealt, distance, examples, first

# Relative to an array's largest value; in comments, the measured difference.
TOLERANCE = 1e-14  # float64: 7.9e-16
FLOAT32_TOLERANCE = 1e-6  # 1.3e-7
FAULT = 1e-2  # smallest difference that a planted fault must cause: 0.17

CLIP = 0.05


def train(
    world_size: int, micro: Sequence[int], make: Callable[[int], Any] = first, bn: str | None = None, **options: Any
) -> Arrays:
    """Return parameters, buffers and metrics after three steps in float64 on replicas that `make` makes."""
    options |= {"loss_normalization": "global", "dtype": "float64"}
    with jax.enable_x64(True):
        ddp = DistributedDataParallel(Net(bn), optim.sgd(0.3, momentum=0.9), replicas=make(world_size), **options)
        state, sums = ddp.steps(ddp.init(), ddp.replicas.shard(dealt(world_size, 3, micro)))
        return jax.device_get({**state.params, **state.buffers, **sums})


@pytest.mark.large
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_devices_and_virtual_replicas_agree(world_size: int) -> None:
    micro = (2, 1) if world_size == 2 else (3,)
    options: dict[str, Any] = {"bn": "local", "clip_grad_norm": CLIP}
    virtual = train(world_size, micro, VirtualReplicas, **options)
    assert distance(train(world_size, micro, **options), virtual) < TOLERANCE


def test_a_hook_on_local_gradients_alone_acts_before_the_mean() -> None:
    hooked = {when: train(2, (3,), gradient_hooks=(GradientHook("*", twice, when),)) for when in ("local", "mean")}
    assert distance(hooked["local"], hooked["mean"]) < TOLERANCE
    assert distance(hooked["local"], train(2, (3,))) > FAULT


def twice(name: str, gradient: jax.Array) -> jax.Array:
    return 2 * gradient


def test_a_step_whose_loss_alone_is_not_finite_is_skipped() -> None:
    def loss(model: Net, batch: Arrays) -> jax.Array:
        return model(batch["x"]).sum(-1) + jax.lax.stop_gradient(np.nan)

    options: dict[str, Any] = {"replicas": first(2), "skip_nonfinite": True}
    ddp = DistributedDataParallel(Net(None), optim.sgd(0.3), loss, **options)
    start = jax.device_get(ddp.init().params)
    state, sums = ddp.steps(ddp.init(), ddp.replicas.shard(dealt(2, 1, (3,))))
    assert jax.device_get(sums)["skipped"].tolist() == [1]
    assert all(np.array_equal(x, start[name]) for name, x in jax.device_get(state.params).items())
    with pytest.raises(InputError, match=r"^skip_nonfinite: a loss scaler skips such steps already; leave one"):
        DistributedDataParallel(Net(None), optim.sgd(0.3), loss, scaler=GradScaler(), **options)


# ---- by hand


@functools.cache
def stages(normalization: str, micro: Sequence[int]) -> tuple[Arrays, Arrays, dict[str, Any], list[list[dict]]]:
    """Make one step of a linear classifier.

    Returns:
        The initial parameters, the metrics, the stages, and sums by hand for each micro-batch, [rank][a].
    """
    replicas, batch = first(2), jax.tree.map(lambda x: x[:, 0], dealt(2, 1, micro))
    with jax.enable_x64(True):
        ddp = DistributedDataParallel(
            layers.Linear(FEATURES, CLASSES, generator=Generator(1)),
            optim.sgd(1.0),
            replicas=replicas,
            loss_normalization=normalization,
            clip_grad_norm=CLIP,
            dtype="float64",
        )
        shared = dict.fromkeys(("gradients", "clipped_gradients", "params", "buffers"))
        axes = {"local_loss": 0, "local_gradients": 0, **shared}
        step = replicas.map(ddp.replica_step, (None, 0), (None, None, axes))
        start = jax.device_get(ddp.init().params)
        _, metrics, found = jax.device_get(step(ddp.init(), replicas.shard(batch)))

    def by_hand(rank: int) -> list[dict]:
        head = batch.head or {"x": [[]] * 2, "y": [[]] * 2}
        pairs = [*zip(head["x"][rank], head["y"][rank], strict=True), (batch.last["x"][rank], batch.last["y"][rank])]
        return [sums_by_hand(start, x, y) for x, y in pairs]

    return start, metrics, found, [by_hand(0), by_hand(1)]


def sums_by_hand(start: Arrays, x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Sum loss, accuracy and gradients over the elements that count, and count them."""
    counts = y != IGNORE_INDEX
    x, y = x[counts], y[counts]
    scores = np.exp(x @ start["kernel"] + start["bias"])
    p = scores / scores.sum(axis=1, keepdims=True)
    error = p - np.eye(CLASSES)[y]
    loss, right = -np.log(p[np.arange(len(y)), y]).sum(), (p.argmax(axis=1) == y).sum()
    return {"count": len(y), "loss": loss, "accuracy": right, "kernel": x.T @ error, "bias": error.sum(axis=0)}


def total(sums: Sequence[dict], name: str) -> Any:
    return sum(part[name] for part in sums)


def mean_of_means(sums: Sequence[dict], name: str) -> Any:
    return np.mean([part[name] / part["count"] for part in sums], axis=0)


def norm(gradients: Arrays) -> float:
    return float(np.sqrt(sum(np.sum(g**2) for g in gradients.values())))


def clipped(gradients: Arrays) -> Arrays:
    return {name: g * min(1, CLIP / (norm(gradients) + 1e-6)) for name, g in gradients.items()}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("micro", [(4,), (3, 3, 1)], ids=str)
@pytest.mark.parametrize("normalization", ["ddp", "global"])
def test_loss_normalization(normalization: str, micro: tuple[int, ...]) -> None:
    start, metrics, found, sums = stages(normalization, micro)
    each = [*sums[0], *sums[1]]
    of_means = {name: mean_of_means(each, name) for name in start}
    of_all = {name: total(each, name) / total(each, "count") for name in start}
    right, wrong = (of_means, of_all) if normalization == "ddp" else (of_all, of_means)
    assert distance(found["gradients"], right) < TOLERANCE
    assert distance(found["gradients"], wrong) > FAULT
    summed = {name: total(each, name) for name in ("loss", "count", "accuracy")}
    assert distance(metrics, {**summed, "grad_norm": norm(right)}) < TOLERANCE


def test_local_gradients_are_the_mean_over_a_ranks_micro_batches() -> None:
    start, _, found, sums = stages("ddp", (3, 3, 1))
    for rank in range(2):
        local = {name: found["local_gradients"][name][rank] for name in start}
        assert distance(local, {name: mean_of_means(sums[rank], name) for name in start}) < TOLERANCE
        assert found["local_loss"][rank] == pytest.approx(mean_of_means(sums[rank], "loss"), rel=TOLERANCE)


def test_clipping_comes_after_the_mean() -> None:
    start, _, found, _ = stages("ddp", (4,))
    right = clipped(found["gradients"])
    clipped_first = [clipped({name: g[rank] for name, g in found["local_gradients"].items()}) for rank in range(2)]
    assert distance(found["clipped_gradients"], right) < TOLERANCE
    assert distance({name: (clipped_first[0][name] + clipped_first[1][name]) / 2 for name in start}, right) > FAULT
    assert distance(found["params"], {name: start[name] - right[name] for name in start}) < TOLERANCE


@pytest.mark.parametrize("micro", [(4,), (3, 3, 1)], ids=str)
def test_buffers_are_those_of_rank_0(micro: tuple[int, ...]) -> None:
    """Each micro-batch updates the running statistics that the one before left."""
    ddp = DistributedDataParallel(
        layers.BatchNorm(FEATURES), optim.sgd(), lambda bn, batch: bn(batch["x"]), replicas=first(2)
    )
    state, _ = ddp.steps(ddp.init(), ddp.replicas.shard(dealt(2, 1, micro)))
    means = np.zeros((2, FEATURES))  # of each rank
    for part in np.split(examples(2, 1, sum(micro))["x"], np.cumsum(micro)[:-1], axis=2):
        means = 0.9 * means + 0.1 * part.mean(axis=(1, 2, 3))
    found = {"mean": np.asarray(state.buffers["mean"])}
    assert distance(found, {"mean": means[0]}) < FLOAT32_TOLERANCE
    assert min(distance(found, {"mean": wrong}) for wrong in (means[1], means.mean(axis=0))) > FAULT
    assert state.buffers["num_batches_tracked"] == len(micro)


# ---- planted faults


def does_nothing(gradients: Any) -> Any:
    return gradients


def test_a_hook_that_does_nothing_is_caught() -> None:
    ddp = DistributedDataParallel(Net(), optim.sgd(0.3), replicas=first(2), comm_hook=does_nothing)
    state, _ = ddp.steps(ddp.init(), ddp.replicas.shard(dealt(2, 1, (4,))))
    with pytest.raises(TrainingError, match=r"replicas differ at step 1: params\.fc\d\.\w+ on replica 1 is up to"):
        ddp.verify(state)
    with pytest.raises(ValueError, match="out_axes"):
        train(2, (4,), VirtualReplicas, comm_hook=does_nothing)


# ---- the compiled program


def loops_around_all_reduces(micro: Sequence[int], loss_fn: Any = cross_entropy, **options: Any) -> list[int]:
    """Return, for each all-reduce in the program of three steps, the number of loops around it."""
    ddp = DistributedDataParallel(Net(), optim.adam(), loss_fn, replicas=first(2), **options)
    hlo = ddp.compiled_text(ddp.init(), ddp.replicas.shard(dealt(2, 3, micro)))
    computations = {m[1]: m[2] for m in re.finditer(r"^(?:ENTRY )?%(\S+) [^\n]*{\n(.*?)^}", hlo, re.M | re.S)}
    loop_of = {body: name for name, text in computations.items() for body in re.findall(r"body=%([^\s,]+)", text)}

    def depth(name: str) -> int:
        return 1 + depth(loop_of[name]) if name in loop_of else 0

    return [depth(name) for name, text in computations.items() for _ in re.findall(r" all-reduce\(", text)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("micro", "normalization"), [((4,), "ddp"), ((2,) * 4, "ddp"), ((2,) * 4, "global")], ids=str)
def test_one_all_reduce_per_optimizer_step(micro: tuple[int, ...], normalization: str) -> None:
    assert loops_around_all_reduces(micro, loss_normalization=normalization, clip_grad_norm=CLIP) == [1]


@pytest.mark.large
def test_an_all_reduce_per_micro_batch_is_caught() -> None:
    def chatty(model: Any, batch: Any) -> Losses:
        return cross_entropy(lambda x: all_reduce(model(x)), batch)

    assert max(loops_around_all_reduces((2,) * 4, chatty)) == 2


# ---- clipping by value, recomputation, operations


@pytest.mark.parametrize("sharded", [False, True])
def test_clipping_by_value_clips_each_element_of_the_mean(sharded: bool) -> None:
    def moved(**options: Any) -> Arrays:
        ddp = DistributedDataParallel(Net(None), optim.sgd(1.0, momentum=0.9), squares, replicas=first(2), **options)
        start = jax.device_get(ddp.init().params)
        state, _ = ddp.steps(ddp.init(), ddp.replicas.shard(dealt(2, 1, (3,))))
        return {name: start[name] - x for name, x in jax.device_get(state.params).items()}

    free, bound = moved(shard_optimizer=sharded), 0.05
    clipped = moved(shard_optimizer=sharded, clip_grad_value=bound)
    assert any((np.abs(x) > bound).any() for x in free.values()) and any(
        (np.abs(x) < bound).any() for x in free.values()
    )
    for name, gradient in free.items():
        np.testing.assert_allclose(clipped[name], np.clip(gradient, -bound, bound), atol=1e-6, err_msg=name)
    with pytest.raises(InputError, match=r"^clip_grad_value: cannot be combined with clip_grad_norm$"):
        DistributedDataParallel(
            Net(None), optim.sgd(), squares, replicas=first(2), clip_grad_norm=1.0, clip_grad_value=1.0
        )


def squares(model: Net, batch: Arrays) -> jax.Array:
    return (model(batch["x"]) ** 2).sum(-1)


class Deep(nnx.Module):
    """Products with much that is cheap to compute again between them, and a parameter that the loss does not reach."""

    def __init__(self) -> None:
        self.layers = nnx.List([nnx.Linear(FEATURES, FEATURES, rngs=nnx.Rngs(i)) for i in range(3)])
        self.unused = nnx.Param(jnp.ones(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + nnx.gelu(nnx.softmax(layer(x)) * jnp.tanh(x))
        return x


def test_recomputation_keeps_products_alone_and_gives_the_same_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    found, kept = {}, {}
    for remat in (False, True):
        options: dict[str, Any] = {"replicas": first(2), "remat": remat, "find_unused_parameters": True}
        ddp = DistributedDataParallel(Deep(), optim.sgd(1.0), squares, **options)
        batch = ddp.replicas.shard(dealt(2, 1, (3,)))
        state = ddp.init()
        program = jax.make_jaxpr(lambda state, ddp=ddp, batch=batch: ddp._steps.program(state, batch))(state)
        kept[remat] = bool({"remat", "remat2", "checkpoint"} & {name for name, _ in primitives(program.jaxpr)})
        found[remat] = jax.device_get(ddp.steps(state, batch)[0].params)
    assert kept == {False: False, True: True}
    for name, expected in found[False].items():
        np.testing.assert_allclose(found[True][name], expected, rtol=1e-6, atol=1e-7, err_msg=name)
    with pytest.raises(InputError, match="unused"):  # the search for unused parameters sees through it
        options = {"replicas": first(2), "remat": True, "find_unused_parameters": False}
        ddp = DistributedDataParallel(Deep(), optim.sgd(1.0), squares, **options)
        ddp.steps(ddp.init(), ddp.replicas.shard(dealt(2, 1, (3,))))

    def loss(params: Any) -> jax.Array:
        return jnp.sum(jnp.tanh(jnp.tanh(params["x"] @ params["w"])) ** 2)

    print_saved_residuals(
        jax.checkpoint(loss, policy=local_gradients._is_product), {"x": jnp.ones((5, 7)), "w": jnp.ones((7, 3))}
    )
    saved = [line for line in capsys.readouterr().out.splitlines() if "from the argument" not in line]
    assert len(saved) == 1 and saved[0].startswith("f32[5,3]") and "dot_general" in saved[0]


def test_the_operations_of_products_are_counted_over_micro_batches_and_steps() -> None:
    ddp = DistributedDataParallel(Deep(), optim.sgd(1.0), squares, replicas=first(2), find_unused_parameters=True)
    # Three products per layer: forward, and backward for the weights and, but in the first layer, for the input.
    per_example = 2 * FEATURES * FEATURES * TOKENS * (3 * 3 - 1)
    for steps, micro in ((1, (3,)), (4, (3,)), (2, (4, 4, 2))):
        assert ddp.product_flops(ddp.init(), dealt(2, steps, micro)) == pytest.approx(per_example / 2, rel=1e-9)


def test_the_keywords_of_the_trainer_are_the_options_of_the_step() -> None:
    declared = {field.name: field.type for field in dataclasses.fields(StepOptions)}
    assert StepKeywords.__annotations__ == declared
