"""Multi-GPU example: its table covers every world size, and the batch files submit valid commands."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from examples.multi_gpu import job
from examples.multi_gpu.__main__ import main
from examples.multi_gpu.job import Options
from jaxddp.cli import parse_plain
from jaxddp.errors import InputError

FOLDER = Path(job.__file__).parent
TINY = Options(hidden_sizes=(8,), batch_per_replica=4, steps=2, rounds=1, devices=2, platform="cpu")


def test_speed_is_the_median_over_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 10.0, 12.0, 20.0, 29.0])  # rounds of 1, 2 and 9 seconds
    monkeypatch.setattr(job, "perf_counter", lambda: next(clock))
    calls: list[None] = []
    options = replace(TINY, rounds=3, batch_per_replica=5, steps=10)
    assert options.examples_per_second(4, lambda: calls.append(None)) == 4 * 5 * 10 / 2
    assert len(calls) == 1 + 3


def test_bad_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="--rounds 0: must be at least 1"):
        parse_plain(Options, ["--rounds", "0"], "prog")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(InputError, match="--framework both: must be torch under torchrun"):
        main(TINY)


@pytest.fixture
def submitted(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Return the words that a batch file passes to srun."""
    path = FOLDER / request.param
    subprocess.run(["bash", "-n", path], check=True)
    srun = tmp_path / "srun"
    srun.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(["bash", path], env=env, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("submitted", ["jax.sbatch"], indirect=True)
def test_slurm_starts_one_process_for_jax(submitted: list[str]) -> None:
    assert submitted[:3] == ["python", "-m", "examples.multi_gpu"]
    options = parse_plain(Options, submitted[3:], "prog")
    assert (options.framework, options.platform, options.devices) == ("jax", "gpu", None)


@pytest.mark.parametrize("submitted", ["torch.sbatch"], indirect=True)
def test_slurm_starts_torchrun_for_torch(submitted: list[str]) -> None:
    assert submitted[0] == "torchrun"
    torchrun = get_args_parser().parse_args(submitted[1:])
    assert torchrun.module and torchrun.training_script == "examples.multi_gpu"
    assert (torchrun.standalone, torchrun.nproc_per_node) == (True, "gpu")
    options = parse_plain(Options, torchrun.training_script_args, "prog")
    assert (options.framework, options.platform, options.devices) == ("torch", "gpu", None)


def test_every_batch_file_is_tested() -> None:
    assert {path.name for path in FOLDER.glob("*.sbatch")} == {"jax.sbatch", "torch.sbatch"}


@pytest.mark.large
def test_torchrun_prints_one_table() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = "--framework torch --platform cpu --hidden-sizes 8 --batch-per-replica 4 --steps 2 --rounds 1"
    command = [*torchrun, "-m", "examples.multi_gpu", *flags.split()]
    run = subprocess.run(command, cwd=FOLDER.parents[1], capture_output=True, text=True, timeout=120, check=True)
    assert [line.split()[0] for line in run.stdout.splitlines()] == ["mlp", "replicas", "1", "2"]
