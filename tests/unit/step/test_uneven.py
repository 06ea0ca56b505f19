"""Uneven inputs: the step with padding and empty replicas, and options that are refused."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax import numpy as jnp

from jaxddp import optim
from jaxddp.config import TrainConfig
from jaxddp.data import datasets
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.data_parallel import DistributedDataParallel
from jaxddp.errors import InputError
from jaxddp.nn.losses import IGNORE_INDEX
from jaxddp.step.local_gradients import LocalResult, mean_over_micro_batches
from jaxddp.train.build import build
from tests.support.step_cases import TOKENS, Arrays, Net, distance, examples, first
from torch_ref.config import TorchConfig
from torch_ref.distributed import World
from torch_ref.train import build as torch_build

TOLERANCE = 1e-14  # float64, relative to an array's largest value; measured: up to 1.2e-15

# ---- the step


def one_step(batch: MicroBatches, **options: Any) -> tuple[Arrays, dict[str, float]]:
    """Return parameters and metrics after a step on two replicas."""
    with jax.enable_x64(True):
        ddp = DistributedDataParallel(Net("local"), optim.sgd(0.3), replicas=first(2), dtype="float64", **options)
        with_dispatch_axis = jax.tree.map(lambda x: x[:, None], batch)
        state, sums = ddp.steps(ddp.init(), ddp.replicas.shard(with_dispatch_axis))
        return jax.device_get({**state.params, **state.buffers}), {name: float(x[0]) for name, x in sums.items()}


def padded(valid: Any) -> MicroBatches:
    """Return two micro-batches of 3 for each of two replicas; padding holds large, finite values."""
    arrays, valid = examples(2, 2, 3), np.asarray(valid, np.float32)
    arrays["x"][valid == 0] = 1e3
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


def test_a_micro_batch_of_ignored_labels_has_a_nan_loss_and_no_gradient_as_in_torch() -> None:
    """Padding alone adds 0 to the sums."""
    logits = torch.ones(3, 2, requires_grad=True)
    torch_loss = F.cross_entropy(logits, torch.full((3,), IGNORE_INDEX))
    torch_loss.backward()
    assert torch_loss.isnan() and not logits.grad.any()
    ddp = DistributedDataParallel(Net(), optim.sgd(0.3), replicas=first(1))
    arrays = examples(1, 3) | {"y": np.full((1, 3, TOKENS), IGNORE_INDEX)}
    for valid, loss in (({}, np.nan), ({"valid": np.ones((1, 3))}, np.nan), ({"valid": np.zeros((1, 3))}, 0.0)):
        result = ddp.no_sync(ddp.init(), ddp.replicas.shard(arrays | valid)).result
        np.testing.assert_equal(np.asarray(result.loss), [loss])
        assert not any(gradient.any() for gradient in jax.device_get(result.gradients).values())


@pytest.mark.parametrize(
    ("count", "count_empty", "loss", "weight"), [(2, True, 3, 1), (2, False, 3, 1), (0, True, 0, 1), (0, False, 0, 0)]
)
def test_a_replica_averages_over_its_micro_batches_and_counts_once(
    count: int, count_empty: bool, loss: float, weight: float
) -> None:
    total = jnp.float32(3 * count)
    mean = mean_over_micro_batches(LocalResult(total, {"w": -total}, jnp.float32(count), {}), count_empty)
    assert (mean.loss, mean.gradients["w"], mean.denominator) == (loss, -loss, weight)


def test_the_mean_of_buffers_is_refused_with_empty_replicas() -> None:
    batch = padded(NONE_ON_1)._replace(buffers_of=np.zeros(2, np.int32))
    with pytest.raises(InputError, match="keep_buffers mean: some replicas have no examples"):
        one_step(batch, keep_buffers="mean")


# ---- the flags


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"join": True, "drop_last": True}, "--join: uses every example, and --drop-last drops some"),
        ({"join": True, "drop_last_batch": True}, "--join: uses every example, and --drop-last-batch drops some"),
        ({"join": True, "model": "char_mlp", "dataset": "names", "buffers": "mean"}, "--buffers mean: cannot"),
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
        ({"shard_optimizer": True}, "--join --shard-optimizer: torch's shards fall behind on ranks without examples"),
        ({"strategy": "manual"}, "--join: only for --strategy ddp or single, not manual"),
        ({"loss_normalization": "global"}, "--join --loss-normalization global: ranks without examples"),
        (
            {"comm_hook": "bf16_compress", "divide_by_initial_world_size": False},
            "--no-divide-by-initial-world-size: torch's hook for --comm-hook bf16_compress always divides by it",
        ),
        (
            {"model": "convnet", "sync_batch_norm": True},
            "--join --sync-batch-norm: DDP's join does not cover SyncBatchNorm's messages",
        ),
    ],
)
def test_combinations_that_torch_does_not_support_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        TorchConfig(join=True, **options)
    TorchConfig(join=True, **options | {"strategy": "single", "comm_hook": "allreduce", "shard_optimizer": False})


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_a_batch_on_which_batch_norm_cannot_train_is_refused_at_the_start(framework: str, tmp_path: Path) -> None:
    """Its last batch has two examples on replica 0, and one on replica 1, padded to two."""
    names = tmp_path / "names.txt"
    names.write_text("\n".join(["hanna", "emil", "otto", "ida", "ada", "hannah", "bob", "eve", "max", "lea", "jon"]))
    options: dict[str, Any] = {"model": "char_mlp", "dataset": "names", "data_path": str(names), "join": True}
    options |= {"devices": 2, "platform": "cpu", "hidden_sizes": (4,)}
    size = len(datasets.load(TrainConfig(**options)).train["y"])
    assert size % 2 == 1
    config = TorchConfig(**options, global_batch_size=size - 3)
    with pytest.raises(InputError, match=f"--global-batch-size {size - 3}: .* choose another size$"):
        build(config) if framework == "jax" else torch_build(World(0, 2), config)
