"""Training with torch_ref: the three strategies agree in parameters, counts, buffers and checks.

All comparisons share one pair of spawned ranks (`ranks`), and each has a planted fault that it must detect.
"""

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from jaxddp.errors import TrainingError
from jaxddp.tracking.run_log import RunLog
from tests.support.torch_cases import BASE, CASES, RANKS, TOLERANCE, case
from torch_ref import train as training
from torch_ref.config import TorchConfig
from torch_ref.data_parallel import broadcast_buffers, wrap
from torch_ref.distributed import World
from torch_ref.evaluate import evaluate
from torch_ref.launch import launch
from torch_ref.loader import EvaluationBatches, to_tensors
from torch_ref.step import accumulate_gradients, train_step
from torch_ref.verify import _majority, verify_replicas


def final_state(world: World, config: TorchConfig) -> dict[str, Tensor]:
    run = training.build(world, config)
    with RunLog(config, None, title="", examples_per_epoch=run.loader.examples_per_epoch, quiet=True) as log:
        training.train_epochs(run, log)
    return run.state.module.state_dict()


def sum_hook(world: World, bucket: dist.GradBucket) -> Future[Tensor]:
    """Plant a fault: sum the gradients instead of averaging them."""
    return allreduce_hook(world.group, bucket).then(lambda future: future.value() * world.world_size)


def uneven_labels() -> dict[str, np.ndarray]:
    """Return micro-batches of 4 sequences for two replicas, with 9, 2, 5 and 1 labels other than -100."""
    random = np.random.default_rng(0)
    x = random.normal(size=(16, 3, 4))
    y = np.full(48, -100)
    for start, count in zip((0, 12, 24, 36), (9, 2, 5, 1), strict=True):
        y[start : start + count] = random.integers(0, 3, count)
    return {"x": x, "y": y.reshape(16, 3)}


def linear_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def uneven_gradients(world: World) -> dict[str, Tensor]:
    """Compute the gradients of an accumulated step with both normalisations; a comm hook records the local ones."""
    gradients = {}
    tensors = to_tensors(uneven_labels(), torch.float64)
    mine = {name: tensor.chunk(RANKS)[world.rank] for name, tensor in tensors.items()}
    micro_batches = [{name: tensor.split(4)[number] for name, tensor in mine.items()} for number in range(2)]
    for normalization in ("ddp", "global"):
        for strategy in ("ddp", "manual"):
            module = linear_model()
            model = wrap(module, world, strategy)
            if isinstance(model, DistributedDataParallel):
                local = {}

                def record(key: str, bucket: dist.GradBucket, local: dict = local) -> Future[Tensor]:
                    local[key] = bucket.buffer().clone()
                    return allreduce_hook(world.group, bucket)

                model.register_comm_hook(f"local.{normalization}", record)
            accumulate_gradients(model, micro_batches, world, normalization)
            gradients[f"{normalization}.{strategy}"] = module.weight.grad.clone()
        gradients |= local
    return gradients


def buffers_of_both(world: World) -> dict[str, Tensor]:
    """Return BatchNorm's running means after two DDP or manual steps of two micro-batches, and after a broadcast."""
    means = {}
    for strategy in ("ddp", "manual"):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
        model = wrap(module, world, strategy)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        torch.manual_seed(world.rank)  # different data on each rank
        for _ in range(2):
            batches = [{"x": torch.randn(6, 3).double(), "y": torch.arange(6) % 4} for _ in range(2)]
            train_step(model, optimizer, None, batches, world)
        means[f"{strategy}.own"] = module[1].running_mean.clone()
        broadcast_buffers(module, world)
        means[f"{strategy}.shared"] = module[1].running_mean.clone()
    return means


def drifted(world: World) -> str:
    """Plant a fault: verify replicas that differ; return the errors."""
    module = linear_model()
    if world.rank == 1:
        module.weight.data[2, 1] += 0.25
    errors = []
    for check in (lambda: verify_replicas(module, world, step=7), lambda: wrap(module, world, "manual")):
        with pytest.raises(TrainingError) as caught:
            check()
        errors.append(str(caught.value))
    return "\n".join(errors)


def evaluated(world: World) -> dict[str, Tensor]:
    """Compute the mean loss over 5 examples on 2 ranks, in 2 batches and 1; as a fault, over a sampler's 6."""
    arrays = {"x": np.arange(20.0).reshape(5, 4), "y": np.array([0, 1, 2, 0, 1])}
    once = evaluate(linear_model(), EvaluationBatches(arrays, BASE, world, batch_size=2), world)
    padded = list(DistributedSampler(range(5), RANKS, world.rank, shuffle=False))
    batches = [{name: torch.from_numpy(array[padded]) for name, array in arrays.items()}]
    return {
        "once": torch.tensor(once["loss"]),
        "padded": torch.tensor(evaluate(linear_model(), batches, world)["loss"]),
    }


def rank_work(world: World, config: TorchConfig) -> None:
    results: dict[str, object] = {}
    for name, config_of_case in CASES.items():
        for strategy in ("ddp", "manual"):
            chosen = dataclasses.replace(config_of_case, strategy=strategy)
            results[f"{name}.{strategy}"] = final_state(world, chosen)
    results["uneven"] = uneven_gradients(world)
    results["buffers"] = buffers_of_both(world)
    results["drifted"] = drifted(world)
    results["evaluated"] = evaluated(world)
    run = training.build(world, CASES["sgd_accumulated"])
    run.model.register_comm_hook(world, sum_hook)
    with RunLog(run.config, None, title="", examples_per_epoch=1, quiet=True) as log:
        training.train_epochs(run, log)
    results["summed"] = run.state.module.state_dict()
    torch.save(results, f"{config.data_path}/{world.rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    launch(rank_work, TorchConfig(dataset="npz", data_path=str(folder), devices=RANKS, platform="cpu"))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


def largest_gap(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


# ----------------------------------------------------------------- the strategies agree


@pytest.mark.parametrize("name", CASES)
def test_ddp_manual_and_single_agree(ranks: list[dict], name: str) -> None:
    single = final_state(World(), dataclasses.replace(CASES[name], strategy="single"))
    for rank in ranks:
        for strategy in ("ddp", "manual"):
            assert largest_gap(rank[f"{name}.{strategy}"], single) < TOLERANCE


def test_strategies_disagree_for_summed_gradients(ranks: list[dict]) -> None:
    assert largest_gap(ranks[0]["summed"], ranks[0]["sgd_accumulated.ddp"]) > 0.01


@pytest.mark.parametrize("fault", [{"seed": 4}, {"shuffle": False}, {"drop_last": True}, {"global_batch_size": 14}])
def test_strategies_disagree_for_other_batches(ranks: list[dict], fault: dict) -> None:
    single = final_state(World(), case(strategy="single", **fault))
    assert largest_gap(ranks[0]["plain.ddp"], single) > 1e-4


def test_accumulating_two_halves_equals_the_whole_batch() -> None:
    whole = case(strategy="single", global_batch_size=32, drop_last_batch=True, optimizer="sgd")
    halves = dataclasses.replace(whole, accumulation_steps=2)
    assert largest_gap(final_state(World(), whole), final_state(World(), halves)) < TOLERANCE
    not_divided = dataclasses.replace(halves, lr=2 * whole.lr)  # equivalent, for SGD, to a missing division
    assert largest_gap(final_state(World(), whole), final_state(World(), not_divided)) > 1e-3


def whole_batch_gradient(*parts: slice) -> Tensor:
    """Compute the gradient of the mean over `parts` of F.cross_entropy's mean within each."""
    model = linear_model()
    tensors = to_tensors(uneven_labels(), torch.float64)
    losses = [F.cross_entropy(model(tensors["x"][part]).flatten(0, 1), tensors["y"][part].flatten()) for part in parts]
    torch.stack(losses).mean().backward()
    return model.weight.grad


def test_both_normalisations_are_right_for_uneven_labels(ranks: list[dict]) -> None:
    quarters = [slice(start, start + 4) for start in range(0, 16, 4)]
    expected = {"global": whole_batch_gradient(slice(None)), "ddp": whole_batch_gradient(*quarters)}
    for rank in ranks:
        for normalization, gradient in expected.items():
            for strategy in ("ddp", "manual"):
                computed = rank["uneven"][f"{normalization}.{strategy}"]
                torch.testing.assert_close(computed, gradient, rtol=0, atol=TOLERANCE)
    assert (expected["global"] - expected["ddp"]).abs().max() > 0.01


def test_the_callers_comm_hook_receives_local_gradients(ranks: list[dict]) -> None:
    quarters = [slice(start, start + 4) for start in range(0, 16, 4)]
    for rank, results in enumerate(ranks):
        local = whole_batch_gradient(*quarters[2 * rank : 2 * rank + 2])
        recorded = results["uneven"]["local.ddp"]  # weight (3, 4) and bias (3,), in some order
        assert any(torch.allclose(recorded[i : i + 12], local.flatten(), atol=TOLERANCE) for i in (0, 3))


def test_rank_0s_buffers_are_sent_before_each_step(ranks: list[dict]) -> None:
    first, second = (rank["buffers"] for rank in ranks)
    for key in ("own", "shared"):
        for buffers in (first, second):
            torch.testing.assert_close(buffers[f"ddp.{key}"], buffers[f"manual.{key}"], rtol=0, atol=TOLERANCE)
    assert not torch.equal(first["ddp.own"], second["ddp.own"])
    assert torch.equal(first["ddp.shared"], second["ddp.shared"])
    assert torch.equal(first["ddp.shared"], first["ddp.own"])


def test_verification_names_parameter_rank_step_and_difference(ranks: list[dict]) -> None:
    for rank in ranks:
        late, early = rank["drifted"].splitlines()
        assert late == (
            "replicas differ at step 7: weight on rank 1 is up to 0.25 away from rank 0; no majority tells which is "
            "right (1 of 2 parameters differ)"
        )
        assert early == late.replace("step 7", "step 0")


def odd_first(world: World, config: TorchConfig) -> None:
    """Plant a fault on rank 0 of three."""
    module = linear_model()
    if world.rank == 0:
        module.weight.data[2, 1] += 0.25
    verify_replicas(module, world, step=7)


@pytest.mark.large
def test_rank_0_is_named_if_the_others_agree() -> None:
    message = (
        r"weight on rank 0 is up to 0.25 away from the majority; rank 0 must be wrong \(1 of 2 parameters differ\)$"
    )
    with pytest.raises(TrainingError, match=message):
        launch(odd_first, TorchConfig(devices=3, platform="cpu", global_batch_size=33))


@pytest.mark.parametrize(
    ("hashes", "expected"),
    [([[1], [2], [2]], (1, True)), ([[1], [2]], (0, False)), ([[1, 1], [2, 2], [2, 1], [3, 1], [2, 1]], (2, False))],
)
def test_the_reference_is_the_largest_group_of_ranks_that_agree(hashes, expected) -> None:
    assert _majority(torch.tensor(hashes)) == expected


def test_evaluation_counts_each_example_once(ranks: list[dict]) -> None:
    x = torch.arange(20.0, dtype=torch.float64).reshape(5, 4)
    expected = F.cross_entropy(linear_model()(x), torch.tensor([0, 1, 2, 0, 1])).item()
    for rank in ranks:
        assert rank["evaluated"]["once"].item() == pytest.approx(expected, abs=1e-6)
        assert abs(rank["evaluated"]["padded"].item() - expected) > 1e-3
