"""Uneven inputs: the loader, BatchNorm and the step with padding, and options that are refused."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import numpy as jnp

from jaxddp import optim
from jaxddp.config import TrainConfig
from jaxddp.data import datasets
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.data.sampler import epoch_indices, shard_table
from jaxddp.data_parallel import DataParallel
from jaxddp.distributed.replicas import VirtualReplicas
from jaxddp.errors import InputError
from jaxddp.loader import Loader
from jaxddp.nn import layers
from jaxddp.nn.functional import Functional
from jaxddp.nn.losses import IGNORE_INDEX
from jaxddp.train import build
from tests.support.step_cases import Arrays, Net, distance, examples, first
from torch_ref.config import TorchConfig
from torch_ref.distributed import World
from torch_ref.loader import Loader as TorchLoader
from torch_ref.train import build as torch_build

TOLERANCE = 1e-14  # float64, relative to an array's largest value; measured: up to 1.2e-15
FAULT = 1e-2  # smallest difference if padding counted; measured: 4e4, as large as the padding

# ---- the loader


def examples_of(batches: Any, world_size: int) -> list[list[list[list[int]]]]:
    """Return the examples without padding: [step][rank][micro-batch]."""
    steps = []
    for batch in batches:
        of_head = (
            []
            if batch.head is None
            else [jax.tree.map(lambda x, a=a: x[:, :, a], batch.head) for a in range(batch.head["x"].shape[2])]
        )
        for k in range(batch.last["x"].shape[1]):
            steps.append([[unpadded(part, rank, k) for part in (*of_head, batch.last)] for rank in range(world_size)])
    return steps


def unpadded(part: Arrays, rank: int, k: int) -> list[int]:
    x = part["x"][rank, k]
    return x[part["valid"][rank, k] > 0].tolist() if "valid" in part else x.tolist()


@given(
    size=st.integers(1, 60),
    world_size=st.integers(1, 9),
    micro=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
    per_dispatch=st.integers(1, 4),
)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_every_example_is_used_once_and_on_the_same_rank_as_in_torch(
    size: int, world_size: int, micro: int, accumulation: int, epoch: int, shuffle: bool, per_dispatch: int
) -> None:
    batch = world_size * micro * accumulation
    options: dict[str, Any] = {"global_batch_size": batch, "accumulation_steps": accumulation, "shuffle": shuffle}
    arrays, replicas = {"x": np.arange(size)}, VirtualReplicas(world_size)
    loader = Loader(arrays, replicas, **options, steps_per_dispatch=per_dispatch, join=True)
    every = list(loader.host_batches(epoch))
    steps = examples_of(every, world_size)
    examples = [example for step in steps for rank in step for part in rank for example in part]
    assert sorted(examples) == list(range(size))
    padded = ["valid" in batch.last for batch in every]
    assert not any(padded[:-1]) and padded[-1] == (size % world_size > 0)  # the other batches need no mask

    active = []  # by step, the ranks that have examples
    for rank in range(world_size):
        reference = TorchLoader(arrays, TrainConfig(**options, join=True), world_size, [rank])
        theirs = [[part["x"].tolist() for part in step] for step in reference.epoch(epoch)]
        assert [step[rank] for step in steps[: len(theirs)]] == theirs
        assert all(not part for step in steps[len(theirs) :] for part in step[rank])
        assert loader.steps_per_epoch == reference.steps_per_epoch == len(steps)
        assert [loader.examples_in(s) for s in range(len(steps))] == [
            reference.examples_in(s) for s in range(len(steps))
        ]
        active.append([step < len(theirs) for step in range(len(steps))])
    highest = [max(rank for rank in range(world_size) if active[rank][step]) for step in range(len(steps))]
    buffers_of = np.concatenate([batch.buffers_of for batch in every], axis=1)
    assert (buffers_of == [*highest[1:], highest[-1]]).all()


def test_a_loader_that_repeats_examples_is_caught() -> None:
    loader = Loader({"x": np.arange(9)}, VirtualReplicas(2), global_batch_size=4)
    examples = [x for step in examples_of(loader.host_batches(0), 2) for rank in step for part in rank for x in part]
    assert sorted(examples) != list(range(9))


def test_the_shard_table_shows_that_nothing_is_repeated() -> None:
    table = shard_table(epoch_indices(9, 4, shuffle=False, join=True), 2, 9)
    assert table.splitlines()[2:4] == ["replica 0 | x1 x5  | x9", "replica 1 | x2 x6  |"]
    assert table.endswith("9 examples on 4 replicas: each used once")


# ---- BatchNorm


VALID = np.array([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]], np.float32)  # of 4 replicas


def batch_norm(sync: bool, x: np.ndarray, valid: np.ndarray | None, cotangent: np.ndarray) -> dict[str, Any]:
    """Compute output, gradients and new statistics of each replica."""
    functional = Functional(layers.BatchNorm(3, sync=sync))

    def run(x: jax.Array, valid: jax.Array | None, cotangent: jax.Array) -> dict[str, jax.Array]:
        def loss(params: Any, x: jax.Array) -> Any:
            bn = functional.module(params, functional.buffers)
            bn.set_attributes(valid=None if valid is None else nnx.data(valid))
            y = bn(x)
            bn.set_attributes(valid=None)
            counts = jnp.ones(4) if valid is None else valid
            return (y * cotangent * counts[:, None, None]).sum(), (y, Functional(bn).buffers)

        (d_params, d_x), (y, buffers) = jax.grad(loss, argnums=(0, 1), has_aux=True)(functional.params, x)
        return {"y": y, "d_x": d_x, "d_scale": d_params["scale"], **buffers}

    axes = (0, None if valid is None else 0, 0)
    return jax.device_get(first(len(x)).map(run, axes, 0)(x, valid, cotangent))


def padded_inputs() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(2, 1, (4, 4, 2, 3))
    x[VALID == 0] = 1e6
    return x, rng.normal(size=x.shape)


@pytest.mark.parametrize("sync", [True, False])
def test_batch_norm_ignores_padding(sync: bool) -> None:
    """Synchronised or per replica; a replica with padding alone keeps its statistics."""
    (x, cotangent), chosen = padded_inputs(), VALID > 0
    with jax.enable_x64(True):
        found = batch_norm(sync, x, VALID, cotangent)
        assert all(np.isfinite(array).all() for array in found.values())
        assert (found["d_x"][~chosen] == 0).all()
        if sync:
            whole = whole_batch_norm(x[chosen], cotangent[chosen])
            ours = {"y": found["y"][chosen], "d_x": found["d_x"][chosen], "d_scale": found["d_scale"].sum(axis=0)}
            assert distance({**ours, "mean": found["mean"][2], "var": found["var"][2]}, whole) < TOLERANCE
            wrong = whole_batch_norm(x.reshape(-1, 2, 3), cotangent.reshape(-1, 2, 3))
            assert abs(wrong["mean"] - found["mean"][0]).max() > FAULT
            return
        for rank in (0, 1, 3):
            mask = chosen[rank]
            alone = whole_batch_norm(x[rank][mask], cotangent[rank][mask])
            ours = {"y": found["y"][rank][mask], "d_x": found["d_x"][rank][mask]}
            ours |= {name: found[name][rank] for name in ("d_scale", "mean", "var")}
            assert distance(ours, alone) < TOLERANCE
        assert found["num_batches_tracked"].tolist() == [1, 1, 0, 1]
        assert (found["mean"][2] == 0).all() and (found["var"][2] == 1).all()


def whole_batch_norm(x: np.ndarray, cotangent: np.ndarray) -> dict[str, np.ndarray]:
    """Compute the same with torch's BatchNorm, in one process."""
    bn = torch.nn.BatchNorm1d(3).double()
    inputs = torch.tensor(x.reshape(-1, 3), requires_grad=True)
    y = bn(inputs)
    (y * torch.tensor(cotangent.reshape(-1, 3))).sum().backward()
    assert bn.weight.grad is not None and inputs.grad is not None
    arrays = {"y": y.detach().reshape(x.shape), "d_x": inputs.grad.reshape(x.shape), "d_scale": bn.weight.grad}
    return {name: array.numpy() for name, array in {**arrays, "mean": bn.running_mean, "var": bn.running_var}.items()}


def test_a_mask_of_another_length_is_refused() -> None:
    bn = layers.BatchNorm(3)
    bn.valid = nnx.data(jnp.ones(2))
    with pytest.raises(InputError, match=r"BatchNorm: valid has 2 examples, but the input has shape \(4, 3\)"):
        bn(jnp.ones((4, 3)))


def test_a_batch_norm_that_cannot_ignore_padding_is_refused() -> None:
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    functional = Functional(model)
    batch = {"x": jnp.ones((4, 2)), "valid": jnp.ones(4)}

    def loss_fn(model: Any, batch: Any) -> jax.Array:
        return model(batch["x"]).sum(axis=-1)

    with pytest.raises(InputError, match=r"layers\.1: BatchNorm would include padded examples in its statistics; use"):
        functional.local_loss(loss_fn, train=True)(functional.params, functional.buffers, batch)
    functional.local_loss(loss_fn, train=False)(functional.params, functional.buffers, batch)  # no statistics


# ---- the step


def one_step(batch: MicroBatches, **options: Any) -> tuple[Arrays, dict[str, float]]:
    """Return parameters and metrics after a step on two replicas."""
    with jax.enable_x64(True):
        ddp = DataParallel(Net("local"), optim.sgd(0.3), replicas=first(2), dtype="float64", **options)
        with_dispatch_axis = jax.tree.map(lambda x: x[:, None], batch)
        state, sums = ddp.steps(ddp.init(), ddp.replicas.shard(with_dispatch_axis))
        return jax.device_get({**state.params, **state.buffers}), {name: float(x[0]) for name, x in sums.items()}


def padded(valid: Any, label: int | None = None) -> MicroBatches:
    """Return two micro-batches of 3 for each of two replicas; padding holds large, finite values."""
    arrays, valid = examples(2, 2, 3), np.asarray(valid, np.float32)
    arrays["x"][valid == 0] = 1e3
    if label is not None:
        arrays["y"][1, 1] = label
    arrays["valid"] = valid
    head, last = ({name: x[:, part] for name, x in arrays.items()} for part in (slice(0, 1), 1))
    return MicroBatches(head, last)


NONE_ON_1 = [[[1, 1, 1], [1, 1, 0]], [[0, 0, 0], [0, 0, 0]]]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("normalization", ["ddp", "global"])
def test_the_values_of_padding_change_nothing(normalization: str) -> None:
    batch = padded([[[1, 1, 1], [1, 1, 0]], [[1, 1, 1], [0, 0, 0]]])
    other = padded([[[1, 1, 1], [1, 1, 0]], [[1, 1, 1], [0, 0, 0]]])
    other.last["x"][other.last["valid"] == 0] = -1e3
    (arrays, sums), (other_arrays, other_sums) = (one_step(b, loss_normalization=normalization) for b in (batch, other))
    assert distance(arrays, other_arrays) == 0 and sums == other_sums
    assert all(np.isfinite(x).all() for x in arrays.values())


@pytest.mark.large
def test_replicas_without_examples_count_only_if_divided_by_the_initial_world_size() -> None:
    """With one of two replicas empty, SGD's update is half as large if the empty replica counts."""
    start = one_step(padded(NONE_ON_1), clip_grad_norm=1e-300)[0]
    (by_both, sums), (by_one, _) = (
        one_step(padded(NONE_ON_1), divide_by_initial_world_size=divide) for divide in (True, False)
    )
    names = [name for name in start if name.startswith("fc")]
    twice = {name: 2 * (by_both[name] - start[name]) for name in names}
    assert distance(twice, {name: by_one[name] - start[name] for name in names}) < TOLERANCE
    counted = examples(2, 2, 3)["y"][0].reshape(6, -1)[:5]
    assert sums["count"] == (counted != IGNORE_INDEX).sum()


@pytest.mark.large
def test_a_micro_batch_of_ignored_labels_gives_nan_and_one_of_padding_does_not() -> None:
    """torch's mean over ignored labels alone is NaN too; padding alone adds 0 to the sums."""
    every = np.ones((2, 2, 3))
    assert np.isnan(one_step(padded(every, label=IGNORE_INDEX))[0]["fc2.bias"]).all() == nan_without_padding()
    assert np.isfinite(one_step(padded(NONE_ON_1, label=IGNORE_INDEX))[0]["fc2.bias"]).all()


def nan_without_padding() -> bool:
    batch = padded(np.ones((2, 2, 3)), label=IGNORE_INDEX)
    head, last = ({name: x for name, x in part.items() if name != "valid"} for part in (batch.head, batch.last))
    return bool(np.isnan(one_step(MicroBatches(head, last))[0]["fc2.bias"]).all())


def test_the_mean_of_buffers_is_refused_with_empty_replicas() -> None:
    batch = padded(NONE_ON_1)._replace(buffers_of=np.zeros(2, np.int32))
    with pytest.raises(InputError, match="keep_buffers mean: some replicas have no examples"):
        one_step(batch, keep_buffers="mean")


# ---- the flags


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"join": True, "drop_last": True}, "--join: uses every example, which --drop-last does not"),
        ({"join": True, "drop_last_batch": True}, "--join: uses every example, which --drop-last-batch does not"),
        ({"join": True, "model": "char_mlp", "dataset": "names", "buffers": "mean"}, "--buffers mean: not with --join"),
        ({"divide_by_initial_world_size": False}, "--no-divide-by-initial-world-size: only with --join"),
        (
            {"join": True, "divide_by_initial_world_size": False, "loss_normalization": "global"},
            "--no-divide-by-initial-world-size: --loss-normalization global divides by",
        ),
    ],
)
def test_options_that_contradict_join_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        TrainConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_optimizer": True}, "--join --shard-optimizer: torch's shards of ranks that have run out fall behind"),
        ({"strategy": "manual"}, "--join: only for --strategy ddp or single, not manual"),
        ({"loss_normalization": "global"}, "--join --loss-normalization global: ranks that have run out"),
        (
            {"comm_hook": "bf16_compress", "divide_by_initial_world_size": False},
            "--no-divide-by-initial-world-size: torch's hook for --comm-hook bf16_compress divides by it anyway",
        ),
        (
            {"model": "convnet", "sync_batch_norm": True},
            "--join --sync-batch-norm: DDP's join does not know what SyncBatchNorm sends",
        ),
    ],
)
def test_combinations_that_torch_does_not_support_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        TorchConfig(join=True, **options)
    TorchConfig(join=True, **options | {"strategy": "single", "comm_hook": "allreduce", "shard_optimizer": False})


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_a_batch_on_which_batch_norm_cannot_train_is_refused_at_the_start(framework: str, tmp_path: Path) -> None:
    """The last batch has two examples on replica 0, and one on replica 1, padded to two."""
    names = tmp_path / "names.txt"
    names.write_text("\n".join(["hanna", "emil", "otto", "ida", "ada", "hannah", "bob", "eve", "max", "lea", "jon"]))
    options: dict[str, Any] = {"model": "char_mlp", "dataset": "names", "data_path": str(names), "join": True}
    options |= {"devices": 2, "platform": "cpu", "hidden_sizes": (4,)}
    size = len(datasets.load(TrainConfig(**options)).train["y"])
    assert size % 2 == 1
    config = TorchConfig(**options, global_batch_size=size - 3)
    with pytest.raises(InputError, match=f"--global-batch-size {size - 3}: .* choose another size$"):
        build(config) if framework == "jax" else torch_build(World(0, 2), config)
