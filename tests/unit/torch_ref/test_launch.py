"""Processes of torch_ref: torchrun equals spawned ranks, failing ranks are named, and none is left behind."""

import inspect
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from jaxddp.errors import InputError, TrainingError
from tests.support.waiting import wait_for
from torch_ref.config import TorchConfig
from torch_ref.data_parallel import wrap
from torch_ref.distributed import World, distributed_optim, process_group
from torch_ref.launch import _cause, _report, launch


def end_to_end(*command: str) -> list[str]:
    flags = ["--dataset", "linear", "--global-batch-size", "100", "--epochs", "2", "--platform", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", *command, *flags], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr.lower()
    return [re.sub(r" *[\d,]+ examples/s|\d+\.\d s |\d+%", "", line) for line in done.stdout.splitlines()]


@pytest.mark.large
def test_torchrun_prints_what_spawned_ranks_print() -> None:
    spawned = end_to_end("torch_ref.train", "--devices", "2")
    launched = end_to_end("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "torch_ref.train")
    assert launched == spawned
    assert [line[:9] for line in spawned] == ["mlp on li", "epoch 1/2", "epoch 2/2", "   the st", "test accu"]
    assert spawned[0].endswith("torch DDP, gloo, world size 2")


def ranks_and_sums(world: World, config: TorchConfig) -> tuple[int, torch.Tensor]:
    return world.rank, world.all_reduce(torch.full((3,), world.rank + 1.0))


def test_launch_returns_the_results_in_the_order_of_the_ranks() -> None:
    for devices, total in ((1, 1.0), (2, 3.0)):
        results = launch(ranks_and_sums, TorchConfig(devices=devices, platform="cpu"))
        assert [rank for rank, _ in results] == list(range(devices))
        assert all(torch.equal(sums, torch.full((3,), total)) for _, sums in results)


def fail_on_rank_1(world: World, config: TorchConfig) -> None:
    Path(config.data_path, f"{world.rank}.pid").write_text(str(os.getpid()))
    world.all_reduce(torch.ones(1))
    if world.rank == 1 and config.model == "linear":
        os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 1:
        raise ZeroDivisionError("one line\nand another")
    if config.model == "linear":
        time.sleep(600)  # never notices that rank 1 is gone
    world.all_reduce(torch.ones(1))  # fails because rank 1 is missing


@pytest.mark.parametrize(
    ("model", "message"),
    [("mlp", "rank 1: ZeroDivisionError: one line"), ("linear", "rank 1: killed by SIGKILL")],
)
def test_a_failing_rank_is_named_and_none_is_left(tmp_path: Path, model: str, message: str) -> None:
    config = TorchConfig(model=model, dataset="npz", data_path=str(tmp_path), devices=2, platform="cpu")
    with pytest.raises(TrainingError) as caught:
        launch(fail_on_rank_1, config)
    assert str(caught.value) == message
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"{rank}.pid").read_text()), 0)


@pytest.mark.large
def test_a_failed_run_prints_one_line_and_closes_its_files(tmp_path: Path) -> None:
    flags = "--platform cpu --devices 2 --optimizer sgd --lr 1e30 --epochs 2"
    command = [sys.executable, "-m", "torch_ref.train", *flags.split(), "--output", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert done.stderr.startswith("error: loss is ")
    assert (tmp_path / "run" / "curves.png").exists()


def test_a_rank_says_where_it_waits_for_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def meet(*arguments: object, **options: object) -> None:
        wait_for(lambda: said.append(capsys.readouterr().err) or "".join(said).count("\n") >= 2, limit=20)
        raise InterruptedError

    monkeypatch.setattr("torch_ref.distributed.PATIENCE", 0.05)
    monkeypatch.setattr(dist, "init_process_group", meet)
    for name, value in {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InterruptedError), process_group(2, 4, torch.device("cpu")):
        pass
    line = r"rank 2 of 4 has waited \d s for the others, to meet at node1:29500"
    assert all(re.fullmatch(line, text) for text in "".join(said).splitlines())


def test_a_rank_that_ends_without_a_report_is_named() -> None:
    assert str(_cause([0, 3, None], Path("none"))) == "rank 1: ended with exit code 3"
    assert str(_cause([1, None, -9], Path("none"))) == "rank 2: killed by SIGKILL"


def test_the_error_of_a_rank_keeps_the_users_frames(tmp_path: Path) -> None:
    frames = ("run.py:3, torch_loss: wrong(x)", "run.py:7, wrong: raise ValueError(x)")
    _report(tmp_path, 1, InputError("run.py: line 7: ValueError: x", frames))
    error = _cause([None, 1], tmp_path)
    assert isinstance(error, InputError) and error.frames == frames and f"{error.__cause__}".endswith("ValueError: x\n")


def test_the_launcher_reads_no_report_that_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _report(tmp_path, 0, InputError("the first error"))
    replace = Path.replace

    def read_then_replace(self: Path, target: Path) -> Path:
        assert str(_cause([1, 1], tmp_path)) == "the first error"
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", read_then_replace)
    _report(tmp_path, 1, RuntimeError("a rank is missing"))
    assert {path.name for path in tmp_path.iterdir()} == {"0.json", "1.json"}
    assert str(_cause([1, 1], tmp_path)) == "the first error"


def test_no_default_argument_keeps_a_destroyed_group_alive() -> None:
    # With such an argument every other rank was aborted when Python exited.
    with process_group(0, 1, torch.device("cpu"), dist.HashStore()) as world:
        wrap(nn.Linear(5, 3), world, "ddp")
        assert inspect.signature(torch.distributed.nn.functional.broadcast).parameters["group"].default is None
        send = distributed_optim().zero_redundancy_optimizer._broadcast_object
        assert inspect.signature(send).parameters["group"].default is None
        assert dist.group.WORLD is world.group


@pytest.mark.large
@pytest.mark.parametrize("background", [False, True])
def test_ranks_end_with_a_killed_launcher(background: bool, tmp_path: Path) -> None:
    interrupts = "signal.SIG_IGN" if background else "signal.default_int_handler"  # what a shell sets for `command &`
    code = (
        f"import signal; signal.signal(signal.SIGINT, {interrupts})\n"
        "from torch_ref.launch import launch; from torch_ref.config import TorchConfig\n"
        "from tests.unit.torch_ref.test_launch import wait_for_ever\n"
        f"config = TorchConfig(dataset='npz', data_path={str(tmp_path)!r}, devices=2, platform='cpu')\n"
        "launch(wait_for_ever, config)\n"
    )
    environment = {  # TMPDIR: torch leaves files behind
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "TMPDIR": str(tmp_path),
    }
    launcher = subprocess.Popen([sys.executable, "-c", code], env=environment)
    wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    launcher.kill()
    launcher.wait()
    for path in tmp_path.glob("*.pid"):
        wait_for(lambda path=path: not Path("/proc", path.read_text()).exists())


def wait_for_ever(world: World, config: TorchConfig) -> None:
    unfinished = Path(config.data_path, f"{world.rank}.tmp")
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(unfinished.with_suffix(".pid"))
    time.sleep(600)
