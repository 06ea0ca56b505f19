"""torch_ref against torch's own promises: its three strategies agree, runs resume, ranks die cleanly.

One pair of ranks is spawned for all comparisons between processes (`ranks`); each of them has a
planted fault beside it that it must find.
"""

import dataclasses
import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from jaxddp import datasets
from jaxddp.config import OPTIMIZER_OPTIONS, TrainConfig
from jaxddp.errors import InputError, TrainingError
from jaxddp.runlog import RunLog, read_metrics
from torch_ref import models, optim
from torch_ref import train as training
from torch_ref.checkpoint import load_checkpoint, save_checkpoint
from torch_ref.config import TorchConfig
from torch_ref.data_parallel import broadcast_buffers, wrap
from torch_ref.devices import check_devices, num_replicas
from torch_ref.distributed import World, process_group
from torch_ref.evaluate import evaluate
from torch_ref.launch import _cause, launch
from torch_ref.loader import ArrayDataset, Loader, epoch_indices, evaluation_batches
from torch_ref.losses import cross_entropy
from torch_ref.state import TrainState
from torch_ref.step import accumulate_gradients, train_step
from torch_ref.verify import verify_replicas
from torch_ref.weights import load_weights, save_weights

TOLERANCE = 1e-12  # float64, of scale 1; measured: at most 4e-16
RANKS = 2

# 61 examples: padded to 62, 31 per replica, so the last of 4 steps has 7 of 8 examples on each.
BASE = TorchConfig(
    dataset="linear",
    num_examples=61,
    num_features=5,
    hidden_sizes=(8,),
    global_batch_size=16,
    epochs=3,
    lr=0.05,
    seed=3,
    devices=RANKS,
    platform="cpu",
    dtype="float64",
    verify_every=1,
)


def case(**changes: object) -> TorchConfig:
    return dataclasses.replace(BASE, **changes)


# Micro-batches of 4 and, last, 4 and 3: their mean of means is not the mean over 7.
CASES = {
    "plain": BASE,
    "sgd_accumulated": case(optimizer="sgd", momentum=0.9, accumulation_steps=2, drop_last=True),
    "global_clipped": case(loss_normalization="global", accumulation_steps=2, clip_grad_norm=0.3),
    "one_cycle": case(schedule="one_cycle", optimizer="adamw", drop_last_batch=True),
}


# ----------------------------------------------------------------- what the pair of ranks does


def final_state(world: World, config: TorchConfig) -> dict[str, Tensor]:
    run = training.build(world, config)
    with RunLog(config, None, title="", examples_per_epoch=run.loader.examples_per_epoch, quiet=True) as log:
        training.train_epochs(run, log)
    return run.state.module.state_dict()


def sum_hook(world: World, bucket: dist.GradBucket) -> Future[Tensor]:
    """Fault: the sum of the gradients instead of their mean."""
    return allreduce_hook(world.group, bucket).then(lambda future: future.value() * world.world_size)


def uneven_labels() -> dict[str, np.ndarray]:
    """Two replicas' micro-batches of 4 sequences, with 9, 2, 5 and 1 labels that count."""
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
    """Gradients of one accumulated step under both normalisations, and each rank's own, from a comm hook."""
    gradients = {}
    tensors = ArrayDataset(uneven_labels(), torch.float64).tensors
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
    """Running means of a BatchNorm after a DDP and a manual step of two micro-batches, and after the broadcast."""
    found = {}
    for strategy in ("ddp", "manual"):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
        model = wrap(module, world, strategy)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        torch.manual_seed(world.rank)  # each rank sees other data
        for _ in range(2):
            batches = [{"x": torch.randn(6, 3).double(), "y": torch.arange(6) % 4} for _ in range(2)]
            train_step(model, optimizer, None, batches, world)
        found[f"{strategy}.own"] = module[1].running_mean.clone()
        broadcast_buffers(module, world)
        found[f"{strategy}.shared"] = module[1].running_mean.clone()
    return found


def drifted(world: World) -> str:
    """Fault: replicas that train apart, then are verified."""
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
    """The mean loss over 5 examples on 2 ranks; and, a fault, over the 6 that a sampler would make of them."""
    arrays = {"x": np.arange(20.0).reshape(5, 4), "y": np.array([0, 1, 2, 0, 1])}
    once = evaluate(linear_model(), evaluation_batches(arrays, BASE, world), world)
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


def test_agreement_notices_a_sum_instead_of_a_mean(ranks: list[dict]) -> None:
    assert largest_gap(ranks[0]["summed"], ranks[0]["sgd_accumulated.ddp"]) > 0.01


@pytest.mark.parametrize("fault", [{"seed": 4}, {"shuffle": False}, {"drop_last": True}, {"global_batch_size": 14}])
def test_agreement_notices_other_batches(ranks: list[dict], fault: dict) -> None:
    single = final_state(World(), case(strategy="single", **fault))
    assert largest_gap(ranks[0]["plain.ddp"], single) > 1e-4


def test_accumulation_of_two_halves_is_the_whole_batch() -> None:
    whole = case(strategy="single", global_batch_size=32, drop_last_batch=True, optimizer="sgd")
    halves = dataclasses.replace(whole, accumulation_steps=2)
    assert largest_gap(final_state(World(), whole), final_state(World(), halves)) < TOLERANCE
    not_divided = dataclasses.replace(halves, lr=2 * whole.lr)  # what forgetting the division means for SGD
    assert largest_gap(final_state(World(), whole), final_state(World(), not_divided)) > 1e-3


def whole_batch_gradient(*parts: slice) -> Tensor:
    """By hand: the mean over `parts` of F.cross_entropy's own mean in each."""
    model = linear_model()
    tensors = ArrayDataset(uneven_labels(), torch.float64).tensors
    losses = [F.cross_entropy(model(tensors["x"][part]).flatten(0, 1), tensors["y"][part].flatten()) for part in parts]
    torch.stack(losses).mean().backward()
    return model.weight.grad


def test_normalisations_of_uneven_labels(ranks: list[dict]) -> None:
    quarters = [slice(start, start + 4) for start in range(0, 16, 4)]
    expected = {"global": whole_batch_gradient(slice(None)), "ddp": whole_batch_gradient(*quarters)}
    for rank in ranks:
        for normalization, gradient in expected.items():
            for strategy in ("ddp", "manual"):
                found = rank["uneven"][f"{normalization}.{strategy}"]
                torch.testing.assert_close(found, gradient, rtol=0, atol=TOLERANCE)
    assert (expected["global"] - expected["ddp"]).abs().max() > 0.01


def test_comm_hook_is_the_callers(ranks: list[dict]) -> None:
    quarters = [slice(start, start + 4) for start in range(0, 16, 4)]
    for rank, found in enumerate(ranks):
        own = whole_batch_gradient(*quarters[2 * rank : 2 * rank + 2])
        recorded = found["uneven"]["local.ddp"]  # weight (3, 4) and bias (3,), in some order
        assert any(torch.allclose(recorded[i : i + 12], own.flatten(), atol=TOLERANCE) for i in (0, 3))


def test_rank_0_s_buffers_are_shared_before_each_step(ranks: list[dict]) -> None:
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
            "replicas differ at step 7: weight on rank 1 is up to 0.25 away from rank 0 (1 of 2 parameters differ)"
        )
        assert early == late.replace("step 7", "step 0")


def test_evaluation_counts_each_example_once(ranks: list[dict]) -> None:
    x = torch.arange(20.0, dtype=torch.float64).reshape(5, 4)
    expected = F.cross_entropy(linear_model()(x), torch.tensor([0, 1, 2, 0, 1])).item()
    for rank in ranks:
        assert rank["evaluated"]["once"].item() == pytest.approx(expected, abs=1e-6)
        assert abs(rank["evaluated"]["padded"].item() - expected) > 1e-3


# ----------------------------------------------------------------- processes


def end_to_end(*command: str) -> list[str]:
    flags = ["--dataset", "linear", "--global-batch-size", "100", "--epochs", "2", "--platform", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", *command, *flags], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr.lower()
    return [re.sub(r" +[\d,]+ examples/s|\d+\.\d s ", "", line) for line in done.stdout.splitlines()]


def test_torchrun_prints_what_spawned_ranks_print() -> None:
    spawned = end_to_end("torch_ref.train", "--devices", "2")
    launched = end_to_end("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "torch_ref.train")
    assert launched == spawned
    assert [line[:9] for line in spawned] == ["mlp on li", "epoch 1/2", "epoch 2/2", "test accu"]
    assert spawned[0].endswith("torch DDP, gloo, world size 2")


def fail_on_rank_1(world: World, config: TorchConfig) -> None:
    Path(config.data_path, f"{world.rank}.pid").write_text(str(os.getpid()))
    world.all_reduce(torch.ones(1))
    if world.rank == 1 and config.model == "linear":
        os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 1:
        raise ZeroDivisionError("one line\nand another")
    if config.model == "linear":
        time.sleep(600)  # never notices that rank 1 is gone
    world.all_reduce(torch.ones(1))  # notices, and fails for want of rank 1


@pytest.mark.parametrize(
    ("model", "message"),
    [("mlp", "rank 1: ZeroDivisionError: one line"), ("linear", "rank 1: killed by SIGKILL")],
)
def test_a_failing_rank_is_named_and_none_is_left(tmp_path: Path, model: str, message: str) -> None:
    config = TorchConfig(model=model, dataset="npz", data_path=str(tmp_path), devices=2, platform="cpu")
    with pytest.raises(TrainingError) as caught:
        launch(fail_on_rank_1, config)
    assert str(caught.value) == message
    for path in tmp_path.glob("*.pid"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_a_rank_that_just_ends_is_named() -> None:
    assert str(_cause([0, 3, None], Path("none"))) == "rank 1: ended with exit code 3"
    assert str(_cause([1, None, -9], Path("none"))) == "rank 2: killed by SIGKILL"


def test_nothing_keeps_a_group_that_was_destroyed() -> None:
    # Ranks of which something did were aborted at their end, every other time.
    with process_group(0, 1, torch.device("cpu"), dist.HashStore()) as world:
        wrap(linear_model(), world, "ddp")
        assert inspect.signature(torch.distributed.nn.functional.broadcast).parameters["group"].default is None


def test_ranks_end_with_a_killed_launcher(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib; from torch_ref.launch import launch; from torch_ref.config import TorchConfig\n"
        "import test_torch_ref\n"
        f"config = TorchConfig(dataset='npz', data_path={str(tmp_path)!r}, devices=2, platform='cpu')\n"
        "launch(test_torch_ref.wait_for_ever, config)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    launcher = subprocess.Popen([sys.executable, "-c", code], env=environment)
    wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    launcher.kill()
    launcher.wait()
    for path in tmp_path.glob("*.pid"):
        wait_until(lambda path=path: not Path("/proc", path.read_text()).exists())


def wait_for_ever(world: World, config: TorchConfig) -> None:
    unfinished = Path(config.data_path, f"{world.rank}.tmp")
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(unfinished.with_suffix(".pid"))
    time.sleep(600)


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_jax_is_never_imported() -> None:
    code = (
        "import sys, torch_ref.train\n"
        "foreign = {'jax', 'jaxlib', 'flax', 'optax', 'orbax'} & sys.modules.keys()\n"
        "print(sorted(foreign), sorted(name for name in sys.modules if name.startswith('jaxddp.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    neutral = {"cli", "config", "curves", "datasets", "errors", "runlog", "sampler", "sizes", "torch_random"}
    assert done.stdout.strip() == f"[] {sorted('jaxddp.' + name for name in neutral)}"


# ----------------------------------------------------------------- a run and its folder


def small(folder: Path, **changes: object) -> TorchConfig:
    """4 epochs of 4 steps in this process, with a checkpoint after the second and the fourth."""
    settings = {"dtype": "float32", "devices": 1, "epochs": 4, "checkpoint_every": 2, "optimizer": "adamw"}
    settings |= {"schedule": "warmup_cosine", "warmup_steps": 3, "output": str(folder)}
    return case(**{**settings, **changes})


def interrupted(config: TorchConfig, monkeypatch: pytest.MonkeyPatch, epoch: int) -> None:
    """Train, and stop in the middle of `epoch`."""
    with monkeypatch.context() as patch:
        make_step = training.train_step

        def stop_in_time(*args: object, **options: object) -> object:
            step = args[2].last_epoch if args[2] is not None else 0
            if step == epoch * 4 + 2:
                raise KeyboardInterrupt
            return make_step(*args, **options)

        patch.setattr(training, "train_step", stop_in_time)
        with pytest.raises(KeyboardInterrupt):
            training.main(config)


def test_resume_is_bit_for_bit_the_uninterrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training.main(small(tmp_path / "whole"))
    interrupted(small(tmp_path / "halves"), monkeypatch, epoch=3)
    assert not (tmp_path / "halves" / "model.safetensors").exists()
    training.main(small(tmp_path / "halves", resume=str(tmp_path / "halves")))
    whole, halves = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "halves"))
    assert whole == halves
    records = [
        [{**record, "examples_per_second": 0} for record in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("whole", "halves")
    ]
    assert records[0] == records[1]
    assert {path.name for path in (tmp_path / "halves").iterdir()} >= {"config.json", "curves.png", "checkpoint.pt"}


def test_resume_notices_forgotten_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training.main(small(tmp_path / "whole"))
    interrupted(small(tmp_path / "halves"), monkeypatch, epoch=3)
    path = tmp_path / "halves" / "checkpoint.pt"
    content = torch.load(path, weights_only=True)
    for moments in content["optimizer"].values():
        moments["exp_avg"].zero_()
    torch.save(content, path)
    training.main(small(tmp_path / "halves", resume=str(tmp_path / "halves")))
    whole, halves = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "halves"))
    assert whole != halves


def new_state(config: TorchConfig) -> TrainState:
    torch.manual_seed(config.seed)
    module = nn.Linear(3, 2)
    return TrainState(module, *optim.from_config(module.parameters(), config, total_steps=20))


@pytest.mark.parametrize("schedule", ["constant", "step", "warmup_cosine", "one_cycle"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rmsprop"])
def test_checkpoint_restores_every_optimizer_and_schedule(tmp_path: Path, schedule: str, optimizer: str) -> None:
    momentum = None if optimizer == "adam" else 0.9
    config = TorchConfig(optimizer=optimizer, schedule=schedule, warmup_steps=4, step_size=3, momentum=momentum, lr=0.1)

    def advance(state: TrainState, steps: int) -> None:
        for step in range(state.step, state.step + steps):
            batch = {"x": torch.full((4, 3), step / 10), "y": torch.arange(4) % 2}
            train_step(state.module, state.optimizer, state.scheduler, [batch], World())
        state.step += steps

    through, resumed = new_state(config), new_state(config)
    advance(through, 6)
    save_checkpoint(tmp_path / "checkpoint.pt", through)
    load_checkpoint(tmp_path / "checkpoint.pt", resumed)
    for state in (through, resumed):
        advance(state, 10)
    assert torch.equal(through.module.weight, resumed.module.weight)
    assert through.optimizer.param_groups[0]["lr"] == resumed.optimizer.param_groups[0]["lr"]


def test_a_flag_beside_resume_overrides_the_checkpoint(tmp_path: Path) -> None:
    state = new_state(TorchConfig(lr=0.1))
    save_checkpoint(tmp_path / "checkpoint.pt", dataclasses.replace(state, step=5))
    resumed = new_state(TorchConfig(lr=0.2))
    state.optimizer.step()
    with pytest.raises(InputError, match="missing bias: exp_avg"):  # saved before its first step
        load_checkpoint(tmp_path / "checkpoint.pt", resumed)
    train_step(state.module, state.optimizer, None, [{"x": torch.ones(2, 3), "y": torch.zeros(2).long()}], World())
    save_checkpoint(tmp_path / "checkpoint.pt", state)
    load_checkpoint(tmp_path / "checkpoint.pt", resumed)
    assert resumed.optimizer.param_groups[0]["lr"] == 0.2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no checkpoint of torch_ref (no checkpoint.pt there)"),
        (b"not a checkpoint", "checkpoint.pt cannot be read"),
        ({"weights": torch.ones(1)}, "checkpoint.pt is not a checkpoint of torch_ref"),
        (Path("/"), "checkpoint.pt cannot be read (Weights only load failed"),
    ],
)
def test_bad_checkpoints_are_one_line(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "checkpoint.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(InputError) as caught:
        load_checkpoint(path, new_state(TorchConfig()))
    assert str(caught.value).startswith(f"--resume {tmp_path}: {message}")
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    batch = {"x": torch.ones(2, 3), "y": torch.zeros(2).long()}
    state = new_state(TorchConfig(optimizer="adam"))
    train_step(state.module, state.optimizer, None, [batch], World())
    save_checkpoint(tmp_path / "checkpoint.pt", state)
    other = new_state(TorchConfig(optimizer="adam", amsgrad=True))
    with pytest.raises(InputError, match="missing bias: max_exp_avg_sq; missing weight: max_exp_avg_sq"):
        load_checkpoint(tmp_path / "checkpoint.pt", other)


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    first = small(tmp_path / "run", epochs=2)
    training.main(first)
    with pytest.raises(TrainingError) as caught:
        training.main(small(tmp_path / "run", resume=first.output, epochs=4, lr=1e30, schedule="constant"))
    assert re.fullmatch(
        rf"loss is (nan|inf) at step \d+ \(epoch 3\); the last good checkpoint is {first.output}/checkpoint.pt; "
        rf"--resume {first.output} goes on from it",
        str(caught.value),
    )
    assert torch.load(Path(first.output) / "checkpoint.pt", weights_only=True)["step"] == 8


def test_weights_are_strict_both_ways(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_weights(path, nn.Sequential(nn.Linear(3, 2)))
    other = nn.ModuleDict({"0": nn.Linear(4, 2, bias=False), "1": nn.Linear(2, 2, bias=False)})
    with pytest.raises(InputError) as caught:
        load_weights(path, other)
    problems = "0.weight has shape (2, 3) and not (2, 4); left over 0.bias; missing 1.weight"
    assert str(caught.value) == f"--weights {path}: does not fit the model: {problems}"
    with pytest.raises(InputError, match="not a readable safetensors file"):
        load_weights(tmp_path / "none", other)


def test_a_run_starts_from_given_weights(tmp_path: Path) -> None:
    path = str(tmp_path / "start.safetensors")
    config = case(devices=1, seed=5, dtype="float32")
    save_weights(Path(path), models.build(config, datasets.load(config)))
    run = training.build(World(), case(devices=1, seed=3, weights=path, strategy="single"))
    expected = models.build(config, datasets.load(config))
    for name, value in run.state.module.state_dict().items():
        assert value.dtype == torch.float64
        assert torch.equal(value, expected.state_dict()[name].double())


# ----------------------------------------------------------------- parts


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("drop_last_batch", [False, True])
def test_loader_is_torchs_dataloader(drop_last: bool, drop_last_batch: bool) -> None:
    config = TrainConfig(global_batch_size=6, drop_last=drop_last, drop_last_batch=drop_last_batch, seed=2)
    arrays = {"x": np.arange(23)}
    orders = []
    for rank in range(2):
        sampler = DistributedSampler(arrays["x"], 2, rank, seed=2, drop_last=drop_last)
        stock = DataLoader(arrays["x"], batch_size=3, sampler=sampler, drop_last=drop_last_batch)
        loader = Loader(arrays, config, num_replicas=2, ranks=[rank])
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            expected = [batch.tolist() for batch in stock]
            found = [[micro_batch["x"].tolist() for micro_batch in step] for step in loader.epoch(epoch)]
            assert found == [[batch] for batch in expected]
            assert [2 * len(batch) for batch in expected] == [loader.examples_in(step) for step in range(len(expected))]
            orders.append(expected)
        assert loader.steps_per_epoch == len(expected)
        assert loader.examples_per_epoch == 2 * sum(map(len, expected))
    assert orders[0] != orders[1]  # set_epoch
    assert sorted(map(str, orders)) == sorted(set(map(str, orders)))
    if not drop_last_batch:
        shares = epoch_indices(23, config, num_replicas=2)
        assert shares.tolist() == [list(chain(*orders[0])), list(chain(*orders[2]))]


def test_loader_groups_micro_batches_by_optimizer_step() -> None:
    config = TrainConfig(global_batch_size=8, accumulation_steps=2, shuffle=False)
    loader = Loader({"x": np.arange(26)}, config, num_replicas=2, ranks=[0])
    steps = [[micro_batch["x"].tolist() for micro_batch in step] for step in loader.epoch(0)]
    assert steps == [[[0, 2], [4, 6]], [[8, 10], [12, 14]], [[16, 18], [20, 22]], [[24]]]
    assert [[m["x"].tolist() for m in step] for step in loader.epoch(0, start_step=2)] == steps[2:]
    assert loader.smallest_micro_batch == 1
    whole = Loader({"x": np.arange(26)}, dataclasses.replace(config, drop_last_batch=True), 2, ranks=[0])
    assert [[m["x"].tolist() for m in step] for step in whole.epoch(0)] == steps[:3]
    with pytest.raises(InputError, match="--global-batch-size 32: larger than the 26 examples"):
        Loader({"x": np.arange(26)}, TrainConfig(global_batch_size=32, drop_last_batch=True), 2, ranks=[0])


def test_cross_entropy_sums_are_torchs_mean() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 5, 3).double(), torch.randint(3, (4, 5))
    labels[1, 2:] = -100
    sums = cross_entropy(nn.Identity(), {"x": logits, "y": labels})
    assert sums["count"] == 17
    assert sums["loss"] / sums["count"] == F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert sums["accuracy"] == (logits.argmax(-1) == labels).sum()


def test_schedules_step_without_a_warning_along_their_formula() -> None:
    parameter = torch.zeros(1, requires_grad=True)
    config = TrainConfig(schedule="warmup_cosine", lr=0.3, warmup_steps=4, min_lr=0.01)
    optimizer, scheduler = optim.from_config([parameter], config, total_steps=12)
    found = []
    for _ in range(12):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    rise = [0.3 * (1 / 3 + 2 / 3 * step / 4) for step in range(4)]
    fall = [0.01 + 0.29 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
    assert found == pytest.approx(rise + fall, abs=1e-15)
    with pytest.raises(InputError, match="--warmup-steps 4: must be below the run's 4 optimizer steps"):
        optim.from_config([parameter], config, total_steps=4)


def test_optimizers_get_the_options_that_were_set() -> None:
    values = {"lr": 0.5, "momentum": 0.25, "nesterov": True, "weight_decay": 0.125, "betas": (0.5, 0.75), "eps": 1e-3}
    values |= {"amsgrad": True, "alpha": 0.75, "centered": True, "lr_decay": 0.5, "initial_accumulator_value": 0.5}
    for name, options in OPTIMIZER_OPTIONS.items():
        chosen = {option: values[option] for option in options if option in values}
        optimizer, _ = optim.from_config([torch.zeros(1, requires_grad=True)], TrainConfig(optimizer=name, **chosen), 1)
        assert type(optimizer).__name__.lower() == name
        assert {option: optimizer.param_groups[0][option] for option in chosen} == chosen


@pytest.mark.parametrize("shape", [(4, 8, 8), (4, 7, 5, 3)])
def test_convnet_reads_images_as_the_datasets_have_them(shape: tuple[int, ...]) -> None:
    model = models.ConvNet(in_channels=shape[3] if len(shape) == 4 else 1, channels=(4, 6), num_classes=3)
    assert model(torch.rand(shape)).shape == (4, 3)


def test_batch_norm_on_a_single_example_is_refused_before_it_happens() -> None:
    config = TorchConfig(dataset="names", model="char_mlp", global_batch_size=2, devices=2, platform="cpu")
    with pytest.raises(InputError, match="BatchNorm cannot train; choose another size, or --drop-last-batch"):
        training.build(World(world_size=2), config)


@pytest.mark.parametrize(
    ("changes", "environment", "message"),
    [
        (
            {"sync_batch_norm": True},
            {},
            "--sync-batch-norm: torch's SyncBatchNorm runs on GPUs only; on CPU --strategy",
        ),
        ({"devices": 3}, {}, "--global-batch-size 16: 3 replicas x 1 accumulation steps do not divide it"),
        ({"devices": 4}, {"RANK": "0", "WORLD_SIZE": "2"}, "--devices 4: torchrun started 2 processes"),
        ({"strategy": "single"}, {"RANK": "0", "WORLD_SIZE": "2"}, "--strategy single: is one process, but torchrun"),
    ],
)
def test_impossible_launches_are_refused_at_once(
    changes: dict, environment: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as caught:
        training.main(case(**changes))
    assert str(caught.value).startswith(message)


def test_unknown_strategies_get_the_nearest_name() -> None:
    with pytest.raises(InputError, match=r"--strategy manul: unknown; did you mean manual\?"):
        TorchConfig(strategy="manul")


def test_single_stands_for_synchronised_batch_norm() -> None:
    check_devices(case(sync_batch_norm=True, strategy="single"))
    assert num_replicas(case(strategy="single")) == RANKS


def test_shards_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    training.main(case(num_examples=9, global_batch_size=6, shuffle=False, print_shards=True))
    assert "replica 1 | x2 x4 x6 | x8 x1*" in capsys.readouterr().out


def test_config_of_a_run_reads_back(tmp_path: Path) -> None:
    config = small(tmp_path / "run", epochs=1)
    training.main(config)
    assert TorchConfig.from_json(tmp_path / "run" / "config.json") == config
    assert json.loads((tmp_path / "run" / "config.json").read_text())["strategy"] == "ddp"
