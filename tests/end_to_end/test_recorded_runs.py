"""Runs of several processes, recorded and compared by the command, with planted faults; and bad input in one line."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import optax
import pytest

from jaxddp.distributed.ports import free_port
from jaxddp.parity import compare_runs
from jaxddp.parity.recordings.causes import of_torch_reduction
from jaxddp.parity.recordings.run import Recording
from jaxddp.parity.report.json_form import from_json
from jaxddp.parity.report.sentences import sentences
from tests.support.recorded_loops import batch_of, train_jax, train_ranks, train_torch


def compare(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxddp.parity", "compare", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record two gloo ranks, which import no jax: right ones as "torch", and those of `TORCH_RUNS`."""
    folder = tmp_path_factory.mktemp("ranks")
    train_ranks(folder, 2, {"name": "torch"}, *({"name": name, **options} for name, (options, _) in TORCH_RUNS.items()))
    return folder / "torch"


# Options of `train_torch`, and the fault in torch's reduction; "": there is none.
TORCH_RUNS: dict[str, tuple[dict[str, object], str]] = {
    "no DDP": ({"reduce": "none"}, "no_sync"),
    "no DDP, clipped": ({"reduce": "none", "clip": 0.5}, "no_sync"),
    "sum": ({"reduce": "sum"}, "sum_not_mean"),
    "sum by hand": ({"reduce": "sum by hand"}, "sum_not_mean"),
    "no_sync inverted": ({"reduce": "early", "accumulate": 3}, "synchronised_early"),
    "micro-batches, no DDP": ({"reduce": "none", "accumulate": 2}, "no_sync"),
    "micro-batches": ({"reduce": "late", "accumulate": 3}, ""),
    "mean by hand": ({"reduce": "by hand", "clip": 0.5}, ""),
    "clipped": ({"clip": 0.5}, ""),
}


@pytest.mark.parametrize("run", TORCH_RUNS)
def test_a_fault_in_torchs_own_reduction_is_named_from_its_local_gradients(run: str, ranks: Path) -> None:
    recording = Recording(ranks.parent / run)
    cause = of_torch_reduction([*recording.steps.values()], recording.epsilon)
    assert (cause.names[0] if cause else "") == TORCH_RUNS[run][1]
    if cause:
        assert sentences(cause)[0].startswith("in torch, ") and "off the mean of its local gradients" in cause.measured


def test_a_fault_in_torchs_own_reduction_is_the_cause_of_different_gradients(ranks: Path, tmp_path: Path) -> None:
    train_jax(tmp_path / "jax", replicas=2, local=True)
    for run, name in (("no DDP", "no_sync"), ("sum", "sum_not_mean")):
        report = compare_runs(ranks.parent / run, tmp_path / "jax")
        first = report.differences[0]
        assert first.stage == "gradients" and first.cause and first.cause.names == (name,), str(report)
        assert "torch's gradients are not the mean of torch's local gradients" in first.detail


def test_two_ranks_and_two_replicas_are_equal(ranks: Path, tmp_path: Path) -> None:
    train_jax(tmp_path / "jax", replicas=2, local=True)
    result = compare(ranks, tmp_path / "jax", "--json", tmp_path / "report.json", "--report", tmp_path / "report.html")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 replicas x 6 steps" in result.stdout and "local gradients" in result.stdout
    report = from_json((tmp_path / "report.json").read_text())
    assert report.verdict == "equal" and report.world_size == 2
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"reduce": "sum"}, "sum_not_mean"),
        ({"reduce": "sum", "local": True}, "sum_not_mean"),
        ({"reduce": "none"}, "no_sync"),
        ({"tx": optax.adamw(1e-2, weight_decay=0.1)}, "decay_value"),
        ({"data": lambda step, rank: batch_of(step)}, "same_shard"),
    ],
    ids=["sum", "sum of local gradients", "no mean", "decay", "same shard"],
)
@pytest.mark.large
def test_a_fault_of_several_replicas_is_named(
    options: dict[str, object], name: str, ranks: Path, tmp_path: Path
) -> None:
    train_jax(tmp_path / "jax", replicas=2, **options)  # type: ignore[arg-type]
    result = compare(ranks, tmp_path / "jax")
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"[{name}]" in result.stdout


JAX_PROCESS = """
import sys, jax, numpy as np, optax
alone = sys.argv[3] == "alone"
if not alone:
    jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxddp.parity import Recorder
mesh = jax.make_mesh((2,), ("data",))
rank = jax.process_index()
params = jax.device_put({"w": np.ones((3, 1), np.float32)}, NamedSharding(mesh, P()))
tx = optax.sgd(0.1)
opt_state = jax.jit(tx.init)(params)
recorder = Recorder(sys.argv[1], 2)
recorder.watch(params)

@jax.jit
def step(params, opt_state, x):
    loss, grads = jax.value_and_grad(lambda p: ((x @ p["w"]) ** 2).mean())(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return loss, grads, optax.apply_updates(params, updates), opt_state

for number in range(3):
    of_ranks = [np.random.default_rng((number, one)).normal(size=(4, 3)).astype("float32") for one in (0, 1)]
    mine = np.concatenate(of_ranks) if alone else of_ranks[rank]
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), mine)
    loss, grads, params, opt_state = step(params, opt_state, x)
    recorder.step({"x": x}, loss, grads=grads, params=params, opt_state=opt_state)
"""

TORCH_PROCESS = """
import sys, numpy as np, torch
import torch.distributed as dist
from jaxddp.parity import Recorder
rank = int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"tcp://{sys.argv[2]}", rank=rank, world_size=2)
model = torch.nn.Linear(3, 1, bias=False)
torch.nn.init.ones_(model.weight)
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recorder = Recorder(sys.argv[1], 2)
recorder.watch(model, optimizer)
for number in range(3):
    x = torch.from_numpy(np.random.default_rng((number, rank)).normal(size=(4, 3)).astype("float32"))
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    recorder.step({"x": x}, loss)
del model, optimizer, recorder, loss  # before the group, see test_unequal_ranks
dist.destroy_process_group()
"""


def run_in_processes(program: str, folder: Path, ranks: Sequence[object] = (0, 1)) -> None:
    devices = "--xla_force_host_platform_device_count=2" if len(ranks) == 1 else ""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo", "XLA_FLAGS": devices}
    command = [sys.executable, "-c", program, str(folder), f"127.0.0.1:{free_port()}"]
    processes = [subprocess.Popen([*command, str(rank)], env=env, stderr=subprocess.PIPE, text=True) for rank in ranks]
    said = [process.communicate(timeout=240)[1] for process in processes]
    assert not any(process.returncode for process in processes), said


@pytest.mark.large
def test_jit_on_two_processes_and_on_one_is_compared_with_two_ranks(tmp_path: Path) -> None:
    run_in_processes(TORCH_PROCESS, tmp_path / "torch")
    run_in_processes(JAX_PROCESS, tmp_path / "jax")
    run_in_processes(JAX_PROCESS, tmp_path / "alone", ["alone"])
    lines = (tmp_path / "jax/rank1/run.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["world_size"] == 2 and len(lines) == 3
    for run, says in (("jax", "2 replicas"), ("alone", "torch ran on 2 replicas and jax on 1")):
        result = compare(tmp_path / "torch", tmp_path / run, "--names", _names(tmp_path))
        assert result.returncode == 0, result.stdout + result.stderr
        assert says in " ".join(result.stdout.split())


def _names(folder: Path) -> Path:
    path = folder / "names.py"
    path.write_text('names = {"w": "weight"}\n')
    return path


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    train_torch(tmp_path / "torch", steps=1, recorded=1)
    for words, says in [
        ((tmp_path / "torch", tmp_path / "none"), "none: no such folder"),
        ((tmp_path / "torch", tmp_path / "torch"), "is a recording of torch; must be of jax"),
        ((tmp_path / "torch", tmp_path / "torch", "--names", tmp_path / "names.py"), "names.py: no such file"),
    ]:
        result = compare(*words)
        assert result.returncode == 2 and not result.stdout
        assert says in result.stderr and result.stderr.count("\n") == 1
